"""The files of examples/ run as their docstrings say."""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.cli.conftest import Command
from tests.distributed.harness import run_processes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gpt2", "nanogpt"])
def test_a_model_verifies(name: str, graphpar: Command) -> None:
    file = ROOT / "examples" / f"{name}.py"
    found = graphpar("verify", f"{file}:model", "--tp", 4, "--sp")
    assert (found.code, found.err) == (0, "")
    assert "equivalent: " in found.out


@pytest.mark.parametrize("name", ["gpt2", "nanogpt"])
def test_the_docstring_names_the_file(name: str) -> None:
    assert f" examples/{name}.py:model --tp " in (ROOT / "examples" / f"{name}.py").read_text()


def torchrun(script: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc-per-node", "2", "--local-ranks-filter", "0", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_train() -> None:
    losses = re.findall(
        r"^step (\d): loss (\d\.\d+), gradient norm \d",
        torchrun(ROOT / "examples" / "train.py"),
        re.MULTILINE,
    )
    assert [step for step, _ in losses] == list("01234")
    assert all(5 < float(loss) < 6 for _, loss in losses)


def run_script(rank: int, group: str, script: str) -> str:
    """What the script prints, in a process that is in a group already."""
    text = io.StringIO()
    with redirect_stdout(text), patch("torch.distributed.init_process_group"):
        runpy.run_path(script, run_name="__main__")
    return text.getvalue()


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(text.partition("```python\n")[2].partition("```")[0])
    first, second = run_processes(2, run_script, str(script))
    assert first == second
    steps = [line.split() for line in first.splitlines()]
    assert [step for step, _ in steps] == list("0123456789")
    losses = [float(loss) for _, loss in steps]
    assert losses[-1] < 4.5 < 5.5 < losses[0]
