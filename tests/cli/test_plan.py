"""What plan prints: a row for each choice, JSON, drawings, what fits, where figures come from."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from graphpar.cost import dry_run
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.trace import trace
from tests.cli.conftest import MODELS, Command
from tests.cli.models import mlp

MLP, LAYERS, BARE = f"{MODELS}:mlp", f"{MODELS}:layers", f"{MODELS}:Declared"
PIPELINE = ("--pp", 2, "--interleave", 2, "--microbatches", 4, "--dp", 2)


def test_a_row_for_each_choice(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--sp")
    assert found.code == 0
    rows = [line.split()[0] for line in found.out.splitlines()]
    assert rows == ["recompute", "none", "selective", "full", "auto"]
    assert "h100, budget 79.65 GiB per device" in found.err
    assert "memory_bytes_per_us: NVIDIA H100 data sheet" in found.err


def test_json(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--json", "--hardware", "a100-40gb")
    data = json.loads(found.out)
    assert (data["tp"], data["hardware"], data["budget_bytes"]) == (2, "a100-40gb", 40 * 2**30)
    assert (data["pp"], data["interleave"], data["microbatches"], data["devices"]) == (1, 1, 1, 2)
    none, *_, auto = data["choices"]
    assert [each["recompute"] for each in data["choices"]] == ["none", "selective", "full", "auto"]
    stages = run_pipeline(trace(*mlp()), default_pipeline(tp=2))
    saved = dry_run(list(stages.values())[-1]).saved_bytes
    assert none["stages"][0]["activation_bytes"] == saved
    assert auto["stages"] == none["stages"]  # there is room
    for each in data["choices"]:
        assert each["fits"]
        for stage in each["stages"]:
            assert stage["peak_bytes"] == sum(
                stage[f"{kind}_bytes"]
                for kind in (
                    "parameter", "gradient", "optimizer", "buffer", "activation", "transient"
                )
            )  # fmt: skip
            assert stage["optimizer_bytes"] == 2 * stage["parameter_bytes"] > 0


def test_pipeline_stages(graphpar: Command) -> None:
    found = graphpar("plan", LAYERS, "--tp", 2, *PIPELINE, "--json")
    data = json.loads(found.out)
    assert data["devices"] == 8
    for each in data["choices"]:
        first, last = each["stages"]
        assert first["in_flight"] == 5
        assert first["parameter_bytes"] == last["parameter_bytes"]
        assert each["iteration_us"] > first["forward_us"] + first["backward_us"]
        assert first["gradient_sync_us"] > 0
        assert 0 < each["bubble"] < 1
        assert 0 < each["mfu"] <= each["hfu"] < 1


def test_a_pipeline_says_which_stage(graphpar: Command) -> None:
    found = graphpar("plan", LAYERS, "--tp", 2, *PIPELINE)
    assert "none: stage 0, 5 forwards in flight; stages wait" in found.err


def test_whole_microbatches(graphpar: Command) -> None:
    """What the budget has room for keeps all; the less it is, the fewer, and it is never passed."""
    rows = {}
    for budget in ("10KB", "1GB"):
        command = ("plan", LAYERS, "--tp", 2, *PIPELINE, "--json", "--budget", budget)
        data = json.loads(graphpar(*command, "--whole-microbatches").out)
        rows[budget] = data["choices"][2]
        assert rows[budget]["recompute"] == "full"
    assert rows["1GB"]["stages"][0]["whole_microbatches"] == 8  # of two chunks
    assert rows["1GB"]["stages"][0]["replay_us"] == 0
    assert rows["1GB"]["iteration_us"] < rows["10KB"]["iteration_us"]
    assert 0 < rows["10KB"]["stages"][0]["whole_microbatches"] < 8
    assert rows["10KB"]["peak_bytes"] <= 10_000


def test_drawings(graphpar: Command, tmp_path: Path) -> None:
    plot, timeline = tmp_path / "memory.svg", tmp_path / "trace.json"
    command = ("plan", LAYERS, "--tp", 2, *PIPELINE, "--choice", "full")
    found = graphpar(*command, "--plot", plot, "--trace", timeline)
    assert found.code == 0
    assert f"wrote {plot}" in found.err
    root = ElementTree.parse(plot).getroot()
    names = [x.text for x in root.iter("{http://www.w3.org/2000/svg}title")]
    kinds = ["parameters", "gradients", "optimizer", "activations", "transients"]
    assert names == [*kinds, "budget"]
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "stage 0",
        "stage 1",
    }


def test_what_does_not_fit(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--budget", "1KiB")
    assert found.code == 0
    assert found.out.count("(does not fit)") == 3
    assert "auto: memory_budget of 1024 B (1024 bytes) is too small: the least" in found.err


def test_the_tensors_of_a_choice(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--report", "full")
    assert "recompute 'full', no budget:" in found.err
    assert "  again " in found.err
    assert "  keep  " in found.err


@pytest.mark.parametrize(
    ("model", "rest", "message"),
    [
        (MLP, ("--hardware", "abacus"), "no hardware is named 'abacus'"),
        (MLP, ("--budget", "much"), "cannot read 'much' as bytes"),
        (MLP, ("--budget", "0"), "memory_budget must be positive"),
        (MLP, ("--tp", "0"), "tp must be"),
        (MLP, ("--pp", "0"), "pp must be at least 1, not 0"),
        (MLP, ("--dp", "0"), "dp must be at least 1, not 0"),
        (MLP, ("--microbatches", "0"), "microbatches must be at least 1, not 0"),
        (MLP, ("--interleave", "2"), "interleave=2 needs pp of at least 2"),
        (
            LAYERS,
            ("--pp", "2", "--interleave", "2", "--microbatches", "5"),
            "must be a multiple of pp=2, not 5; legal: 4, 6, ...",
        ),
        (LAYERS, ("--pp", "3"), "4 layers cannot be dealt to pp=3 stages; legal: 1, 2, 4"),
        (
            LAYERS,
            ("--pp", "4", "--interleave", "2"),
            "4 layers cannot be dealt to pp=4 stages with interleave=2; legal: 2",
        ),
        (BARE, ("--pp", "2"), "the model has no repeated block, so it is planned as one block"),
        (MLP, ("--plot", "/nowhere/x.svg"), "cannot write /nowhere/x.svg: there is no folder"),
    ],
)
def test_bad_input(graphpar: Command, model: str, rest: tuple[str, ...], message: str) -> None:
    found = graphpar("plan", model, "--tp", 2, *rest)
    assert found.code == 2
    assert message in found.err
