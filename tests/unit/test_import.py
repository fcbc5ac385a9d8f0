"""Importing graphpar loads nothing heavy that torch does not load itself."""

import subprocess
import sys

import pytest

import graphpar

HEAVY = (
    "networkx",
    "rich",
    "safetensors",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._export",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.export._trace",
    "triton",
)
PROGRAM = """
import sys
import torch
before = set(sys.modules)
import graphpar
after = set(sys.modules) - before
print(*after)
assert "transform" in dir(graphpar)
graphpar.transform
assert "graphpar.api" in sys.modules
"""


def test_heavy_modules_wait_for_their_first_use() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.split()
    assert "graphpar" in loaded
    heavy = [m for m in loaded if any(m == h or m.startswith(f"{h}.") for h in HEAVY)]
    assert not heavy


@pytest.mark.parametrize("name", graphpar.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(graphpar, name).__name__.endswith(name)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'transfrom'"):
        graphpar.transfrom  # type: ignore[attr-defined]  # noqa: B018
