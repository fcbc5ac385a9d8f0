"""The files of examples/ run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["gpt2", "nanogpt"])
def test_a_model_verifies(name: str, graphpar: Command) -> None:
    file = EXAMPLES / f"{name}.py"
    found = graphpar("verify", f"{file}:model", "--tp", 4, "--sp")
    assert (found.code, found.err) == (0, "")
    assert "equivalent: " in found.out


@pytest.mark.parametrize("name", ["gpt2", "nanogpt"])
def test_the_docstring_names_the_file(name: str) -> None:
    assert f" examples/{name}.py:model --tp " in (EXAMPLES / f"{name}.py").read_text()


def test_train() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", EXAMPLES / "train.py"],
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"^step (\d): loss (\d\.\d+), gradient norm \d", run.stdout, re.MULTILINE)
    assert [step for step, _ in losses] == list("01234")
    assert all(5 < float(loss) < 6 for _, loss in losses)
