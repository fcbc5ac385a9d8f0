"""What dump prints and writes: stages, formats, the table of collectives."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphpar.errors import PartitionError
from graphpar.pipeline import PASSES
from tests.cli.conftest import MODELS, Command
from tests.cli.schema import documented, problems

ROOT = Path(__file__).parents[2]
STAGES = ["trace", *(name for name in PASSES if not name.endswith("-recompute"))]
MLP = f"{MODELS}:mlp"


def test_the_last_stage_is_printed(graphpar: Command) -> None:
    found = graphpar("dump", MLP, "--tp", 2, "--sp")
    assert found.code == 0
    assert found.out.startswith("import torch\n")
    assert "def forward(self, input):\n" in found.out
    assert "linear_scatter(" in found.out
    assert found.out == graphpar("dump", MLP, "--tp", 2, "--sp", "--stage", "fuse-collectives").out


def test_one_stage(graphpar: Command) -> None:
    trace = graphpar("dump", MLP, "--tp", 2, "--stage", "trace")
    assert trace.code == 0
    assert "ops.convert" not in trace.out
    *counts, layers = trace.err.splitlines()
    assert counts == ["block    calls  ops", "forward  × 1    10"]
    assert re.fullmatch(r"trace: 1 \(Layer\): layer_norm at models.py:.* is not as in 0", layers)
    typed = graphpar("dump", MLP, "--tp", 2, "--stage", "insert-collectives")
    assert "f32[2, 4, 16] Shard(2: up)" in typed.out


def test_all_stages(graphpar: Command) -> None:
    found = graphpar("dump", MLP, "--tp", 2, "--all-stages")
    assert re.findall("^# stage: (.*)$", found.out, re.MULTILINE) == STAGES
    compile(found.out, "dump", "exec")
    last = graphpar("dump", MLP, "--tp", 2)
    assert found.out.endswith(f"# stage: fuse-collectives\n{last.out}")
    assert found.err.splitlines()[:-1] == last.err.splitlines()[:-1]  # the last line has a time


def test_what_backward_runs_again(graphpar: Command) -> None:
    command = "dump", MLP, "--tp", 2, "--sp"
    found = graphpar(*command, "--recompute", "full")
    assert found.code == 0
    assert "    def region_0(made, hold, x" in found.out
    assert "    def again_0(made, x" in found.out
    assert " = ops.recompute(region_0, again_0, [x" in found.out
    assert "  again in backward\n" in found.out
    assert "recompute 'full', no budget:" in found.err
    assert "region_0" not in graphpar(*command).out


def test_masks(graphpar: Command) -> None:
    command = "dump", f"{MODELS}:dropping", "--tp", 2
    names = {"invariant": "seeded_dropout", "exact": "dropout", "per-rank": "rank_dropout"}
    for rng, name in names.items():
        found = graphpar(*command, "--rng", rng).out
        assert f" = ops.{name}(" in found
        assert ("ops.draw_seed(" in found) == (rng != "exact")
    assert graphpar(*command).out == graphpar(*command, "--rng", "invariant").out


def test_the_identity(graphpar: Command) -> None:
    found = graphpar("dump", MLP, "--tp", 1)
    assert found.code == 0
    assert "ops." not in found.out.partition("aten = ")[2].partition("\n")[2]
    assert found.out == graphpar("dump", MLP, "--tp", 1, "--stage", "outline").out


@pytest.mark.parametrize("suffix", ["py", "json", "dot"])
def test_files(suffix: str, graphpar: Command, tmp_path: Path) -> None:
    options = ("dump", MLP, "--tp", 2, "--format", suffix)
    folder = tmp_path / "new" / "dump"
    found = graphpar(*options, "--all-stages", "-o", folder)
    names = [f"{number:02}-{stage}.{suffix}" for number, stage in enumerate(STAGES)]
    assert found.code == 0
    assert found.out.splitlines() == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == names
    last = folder / names[-1]
    assert last.read_text() == graphpar(*options).out

    shutil.rmtree(folder)
    assert graphpar(*options, "-o", folder).out == f"{last}\n"
    assert list(folder.iterdir()) == [last]


def test_a_folder_that_cannot_be(graphpar: Command, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    found = graphpar("dump", MLP, "--tp", 2, "-o", taken)
    assert (found.code, found.out) == (2, "")
    assert found.err == f"cannot write to {taken}: File exists\n"


def test_the_stages_before_a_failure(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PartitionError("no")

    failing = {**PASSES, "annotate-partitions": (refuse, PASSES["annotate-partitions"][1])}
    monkeypatch.setattr("graphpar.pipeline.PASSES", failing)
    found = graphpar("dump", MLP, "--tp", 2, "--all-stages")
    assert found.code == 2
    assert re.findall("^# stage: (.*)$", found.out, re.MULTILINE) == STAGES[:6]
    assert found.err.splitlines() == ["no", "  in step annotate-partitions{tp=2}"]
    assert graphpar("dump", MLP, "--tp", 2).out == ""
    assert graphpar("dump", MLP, "--tp", 2, "--stage", "name-axes").code == 0


@pytest.mark.parametrize(
    ("options", "layer", "forward"),
    [
        (
            ("--sp",),
            [
                ["0", "× 2", "forward", "1 all_gather, 1 reduce_scatter", "–"],
                ["backward", "2 all_gather, 1 reduce_scatter", "1 all_reduce"],
            ],
            [["forward", "× 1", "forward", "1 all_gather", "–"], ["backward", "1 all_gather", "–"]],
        ),
        (
            (),
            [["0", "× 2", "forward", "1 all_reduce", "–"], ["backward", "1 all_reduce", "–"]],
            [["forward", "× 1", "forward", "–", "–"], ["backward", "–", "–"]],
        ),
    ],
)
def test_the_table_of_collectives(
    options: tuple[str, ...], layer: list[list[str]], forward: list[list[str]], graphpar: Command
) -> None:
    found = graphpar("dump", MLP, "--tp", 2, *options)
    head, *rows, _, report = [re.split("  +", line.strip()) for line in found.err.splitlines()]
    assert head == ["block", "calls", "activations", "parameters"]
    layer[0][0] = rows[0][0]  # the block's name
    assert rows == [*layer, *forward]
    assert re.fullmatch(
        r"partition: [\d.]+ us modelled per step, bound [\d.]+ us, solved in [\d.]+ s", report[0]
    )


# --- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_json_fits_its_schema(stage: str, graphpar: Command) -> None:
    schema = documented()
    found = graphpar("dump", MLP, "--tp", 2, "--sp", "--format", "json", "--stage", stage)
    program = json.loads(found.out)
    assert problems(program, schema, schema) == []
    for graph in program["graphs"]:
        names = [node["name"] for node in graph["nodes"]]
        assert len(set(names)) == len(names)
        for number, node in enumerate(graph["nodes"]):
            assert set(node["inputs"]) <= set(names[:number])


def test_json_of_all_stages(graphpar: Command) -> None:
    found = graphpar("dump", MLP, "--tp", 2, "--format", "json", "--all-stages")
    programs = json.loads(found.out)
    assert list(programs) == STAGES
    last = graphpar("dump", MLP, "--tp", 2, "--format", "json")
    assert programs["fuse-collectives"] == json.loads(last.out)


def test_the_schema_refuses() -> None:
    schema = documented()
    good: dict[str, Any] = {"version": 1, "ranks": 2, "form": "local", "graphs": [], "state": []}
    assert problems(good, schema, schema) == []
    changes: list[dict[str, Any]] = [
        {"version": 2},
        {"form": "odd"},
        {"ranks": "2"},
        {"more": 1},
        {"graphs": [{}]},
    ]
    for change in changes:
        assert problems(good | change, schema, schema)


STATEMENT = re.compile(
    r"""
    (?P<open>digraph\ \w+\ \{|subgraph\ \w+\ \{) | (?P<close>\}) | (?P<edge>(\w+)\ ->\ (\w+);)
    | (?P<node>(?!node\b)(\w+)\ \[(\w+=("(\\.|[^"\\])*"|[\w.]+),?\ ?)+\];)
    | (?P<set>(\w+=("(\\.|[^"\\])*"|\w+)|node\ \[[^\]]*\]);)
    """,
    re.VERBOSE,
)


def check_dot(text: str) -> tuple[int, int]:
    """The number of nodes and edges of a graph in the part of the language that we write."""
    depth, nodes, edges, at = 0, set(), [], 0
    text = re.sub(r"\s*\n\s*", "\n", re.sub("^//.*$", "", text, flags=re.MULTILINE)).strip()
    while at < len(text):
        found = STATEMENT.match(text, at)
        assert found, f"not understood: {text[at : at + 80]!r}"
        depth += (found["open"] is not None) - (found["close"] is not None)
        assert depth >= 0
        if found["edge"]:
            edges.append((found[4], found[5]))
        if found["node"]:
            nodes.add(found[7])
        at = found.end() + len(re.match(r"\s*", text[found.end() :])[0])  # type: ignore[index]
    assert depth == 0
    assert nodes.issuperset(name for edge in edges for name in edge)
    return len(nodes), len(edges)


@pytest.mark.parametrize("stage", STAGES)
def test_dot(stage: str, graphpar: Command) -> None:
    options = ("dump", MLP, "--tp", 2, "--sp", "--stage", stage, "--format")
    text = graphpar(*options, "dot").out
    graphs = json.loads(graphpar(*options, "json").out)["graphs"]
    nodes = [node for graph in graphs for node in graph["nodes"]]
    assert check_dot(text) == (len(nodes), sum(len(node["inputs"]) for node in nodes))
    assert text.count("subgraph") == len(graphs)


def test_dot_of_all_stages(graphpar: Command) -> None:
    text = graphpar("dump", MLP, "--tp", 2, "--format", "dot", "--all-stages").out
    check_dot(text)
    assert text.count("digraph") == len(STAGES)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it(graphpar: Command) -> None:
    text = graphpar("dump", MLP, "--tp", 2, "--sp", "--format", "dot").out
    drawn = subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "<svg" in drawn.stdout


def test_colours_on_a_terminal(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = graphpar("dump", MLP, "--tp", 2, "--sp").out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = graphpar("dump", MLP, "--tp", 2, "--sp").out
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_the_same_text_in_every_process() -> None:
    """Sets and dicts of other processes may iterate in another order."""
    code = (
        "from graphpar.cli.main import main\n"
        "main(['dump', 'examples/gpt2.py:model', '--tp=4', '--sp', '--all-stages'])\n"
        "main(['dump', 'examples/nanogpt.py:model', '--tp=2', '--all-stages', '--format=json'])\n"
    )

    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    (first, error), (second, _) = (child.communicate() for child in children)
    assert "def transformer_h(self, x):" in first, error
    assert first == second
