"""Exit codes, errors, warnings, and what is printed where."""

import gc
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from graphpar.cli import main as main_module
from graphpar.cli import verify
from graphpar.errors import PartitionError, VerifyError
from tests.cli.conftest import MODELS, Command, at

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT)}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "graphpar", *arguments],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, and all that it starts, would ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_help_and_version(graphpar: Command) -> None:
    found = graphpar("--help")
    assert found.code == 0
    for command in ("dump", "plan", "verify", "codegen", "demo"):
        assert command in found.out
        assert graphpar(command, "--help").code == 0
    version = graphpar("--version")
    assert version.code == 0
    assert version.out.startswith("graphpar ")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), "a command is needed"),
        (("train",), "invalid choice: 'train'"),
        (("dump",), "the following arguments are required: MODEL, --tp"),
        (("dump", "x.py:m", "--tp", "two"), "argument --tp: invalid int value: 'two'"),
        (("dump", "x.py:m", "--tp", "2", "--format", "html"), "invalid choice: 'html'"),
        (("dump", "x.py:m", "--tp", "2", "--stage", "a", "--all-stages"), "not allowed with"),
        (("verify", "x.py:m", "--tp", "2", "--stage", "a"), "unrecognized arguments"),
    ],
)
def test_usage(arguments: tuple[str, ...], wanted: str, graphpar: Command) -> None:
    found = graphpar(*arguments)
    assert (found.code, found.out) == (2, "")
    assert wanted in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("dump", f"{MODELS}:mlp", "--tp", "0"), "tp must be at least 1, not 0"),
        (("verify", f"{MODELS}:mlp", "--tp", "-1"), "tp must be at least 1, not -1"),
        (("demo", "--tp", "0"), "tp must be at least 1, not 0"),
        (("demo", "--steps", "0"), "--steps must be at least 1, not 0"),
        (
            ("dump", "x.py:m", "--tp", "2", "--stage", "traces"),
            "there is no stage 'traces'; known: trace, lower-recurrences, outline, "
            "split-dropout, normalize, name-axes, annotate-partitions, insert-collectives, "
            "fuse-biases, localize, seed-dropout, fuse-collectives",
        ),
        (
            ("dump", "x.py:m", "--tp", "1", "--stage", "localize"),
            "known: trace, lower-recurrences, outline, split-dropout, seed-dropout",
        ),
    ],
)
def test_wrong_values(arguments: tuple[str, ...], wanted: str, graphpar: Command) -> None:
    found = graphpar(*arguments)
    assert (found.code, found.out) == (2, "")
    assert found.err.strip().endswith(wanted)
    assert len(found.err.splitlines()) == 1


def test_a_model_that_cannot_be_traced(graphpar: Command) -> None:
    found = graphpar("dump", f"{MODELS}:data_dependent", "--tp", 2)
    assert (found.code, found.out) == (2, "")
    first, *rest = found.err.splitlines()
    assert first.startswith("torch.export cannot trace the model: its control flow")
    assert rest == [at("if x.sum() > 0:")]


def test_traceback(graphpar: Command) -> None:
    found = graphpar("dump", f"{MODELS}:raises", "--tp", 2, "--traceback")
    assert found.code == 2
    assert "Traceback (most recent call last)" in found.err
    assert "in raises" in found.err
    assert found.err.rstrip().endswith(at('raise ValueError("no weights here")'))


def test_an_error_in_a_step(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        error = PartitionError("8 heads cannot be split over tp=5; legal: 1, 2, 4, 8")
        error.add_note("  at model.py:41: q = self.q(x)")
        error.add_note("in step annotate-partitions{tp=5}")
        raise error

    monkeypatch.setattr("graphpar.cli.build.run_pipeline", refuse)
    found = graphpar("dump", f"{MODELS}:mlp", "--tp", 5)
    assert (found.code, found.out) == (2, "")
    assert found.err.splitlines() == [
        "8 heads cannot be split over tp=5; legal: 1, 2, 4, 8",
        "  at model.py:41: q = self.q(x)",
        "  in step annotate-partitions{tp=5}",
    ]


def test_a_fault_of_ours(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise VerifyError("x is Partial, not Shard(0)")

    monkeypatch.setattr("graphpar.cli.build.run_pipeline", broken)
    found = graphpar("dump", f"{MODELS}:mlp", "--tp", 2)
    assert (found.code, found.out) == (70, "")
    assert found.err.splitlines() == [
        "internal fault: VerifyError: x is Partial, not Shard(0)",
        "  pipeline: lower-recurrences,outline,split-dropout,normalize,name-axes,"
        "annotate-partitions{tp=2},"
        "insert-collectives,fuse-biases,localize,seed-dropout,fuse-collectives",
        "This is a fault of graphpar: please report it with these lines; --traceback gives the "
        "rest.",
    ]


def test_a_warning_is_printed_once(graphpar: Command) -> None:
    found = graphpar("dump", f"{MODELS}:opaque", "--tp", 2)
    assert found.code == 0
    lines = [line for line in found.err.splitlines() if "linalg_qr" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: aten.linalg_qr.default has no partitioning rule")
    assert at("y: Tensor = self.down(torch.linalg.qr(self.up(x)).Q)") in found.err
    assert "GraphparWarning" not in found.err


def test_nothing_to_shard(graphpar: Command) -> None:
    found = graphpar("dump", f"{MODELS}:odd", "--tp", 8)
    assert found.code == 0
    assert found.err.startswith("warning: nothing was sharded: no axis that may be cut has tp=8")


def test_interrupted(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "load_model", interrupt)
    found = graphpar("verify", f"{MODELS}:mlp", "--tp", 2)
    assert (found.code, found.out, found.err) == (130, "", "interrupted\n")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A model that says when it is being made, and takes long."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import sys, time\ndef model():\n    print('made', flush=True)\n    time.sleep(60)\n"
    )
    return file


def test_ctrl_c(slow: Path) -> None:
    process = start("verify", f"{slow}:model", "--tp", "2")
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_a_broken_pipe_is_quiet() -> None:
    process = start("dump", f"{MODELS}:mlp", "--tp", "2", "--all-stages")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert (process.wait(60), err) == (141, "")


def test_the_script_is_this_function() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"graphpar": f"{main_module.__name__}:main"}


def test_the_collector_waits(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def show(*_: object) -> None:
        seen.append(gc.isenabled())

    monkeypatch.setattr("graphpar.cli.dump.show", show)
    assert graphpar("dump", f"{MODELS}:mlp", "--tp", 2).code == 0
    assert graphpar("dump", f"{MODELS}:mlp", "--tp", 2, "--stage", "nothing").code == 2
    assert (seen, gc.isenabled()) == ([False], True)
