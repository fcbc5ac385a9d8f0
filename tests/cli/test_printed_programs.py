"""The printed Python of every stage runs, and gives what the model gives."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphpar
from graphpar.cli.build import build_stages
from graphpar.cli.loading import Loaded, load_model
from graphpar.container import mirror, place
from graphpar.pipeline import PASSES, default_pipeline
from graphpar.printer import format_python
from graphpar.program import Program
from graphpar.runtime import select
from graphpar.state import local_part, unpadded
from graphpar.trace import flatten
from tests.distributed.harness import run_threads

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {
    "nanogpt": f"{EXAMPLES / 'nanogpt.py'}:model",
    "gpt2": f"{EXAMPLES / 'gpt2.py'}:model",
    "uneven": f"{Path(__file__).parent / 'models.py'}:uneven",
}
RANKS = 2


@cache
def stages(example: str) -> tuple[Loaded, dict[str, Program], list[Any]]:
    """A model in eval mode, its program after each pass, and its own flat outputs."""
    loaded = load_model(MODELS[example])
    loaded.module.eval()
    found: dict[str, Program] = {}
    build_stages(loaded, default_pipeline(tp=RANKS, sp=True, recompute="full"), found.__setitem__)
    with torch.no_grad():
        outputs = loaded.module(*loaded.args, **loaded.kwargs)
    return loaded, found, pytree.tree_leaves(outputs)


def run_printed(
    model: nn.Module, program: Program, inputs: Sequence[Any], group: str = "", rank: int = 0
) -> list[Any]:
    """Execute the printed program of one rank on what that rank holds of the state."""
    root = mirror(model)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        state = program.state[name]
        if program.form == "local":
            part = local_part(value, state.type, rank, program.ranks)
            value = unpadded(part, state.type, rank, program.ranks)
        for alias in state.names:
            place(root, alias, value)
    space: dict[str, Any] = {"tp": group, **program.constants}
    exec(format_python(program), space)
    with torch.no_grad():
        outputs: list[Any] = space["forward"](root, *inputs)
    return outputs


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Tensor)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", ["trace", *PASSES])
@pytest.mark.parametrize("example", MODELS)
def test_a_printed_stage_runs(example: str, stage: str) -> None:
    loaded, found, expected = stages(example)
    program = found[stage]
    inputs = select(flatten(loaded.args, loaded.kwargs)[0], program)
    if program.form == "whole":
        same(run_printed(loaded.module, program, inputs), expected)
        return
    # On whole tensors, collectives of one rank are the identity.
    ranks = program.ranks if program.form == "local" else 1

    def run(rank: int, group: str) -> list[Any]:
        return run_printed(loaded.module, program, inputs, group, rank)

    for outputs in run_threads(ranks, run):
        same(outputs, expected)


def test_it_names_lines_types_and_passes() -> None:
    text = format_python(stages("nanogpt")[1]["localize"])
    assert "    # nanogpt.py:22: q, k, v = self.qkv(x).split(width, dim=2)\n" in text
    assert "def blocks(self, x):  # × 4: blocks.0 … blocks.3\n" in text
    assert "  # f32[2, 32, 64] Shard(1: sequence)  insert-collectives\n" in text


class Named(nn.Module):
    """Arguments, and a parameter that a layer reads, with the names of the text's globals."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.ops = nn.Parameter(torch.randn(8))

    def forward(
        self, ops: Tensor, tp: Tensor, aten: Tensor, run: Tensor, local: Tensor, ops_: Tensor,
        forward: Tensor, region_0: Tensor, constant_0: Tensor, inf: Tensor, device: Tensor
    ) -> Tensor:  # fmt: skip
        x = ops * tp + aten * run + local * ops_ + forward * region_0 + constant_0 + inf * device
        y: Tensor = self.b(torch.relu(self.a(x + self.ops)))
        return y


def test_any_argument_name_is_fine() -> None:
    torch.manual_seed(0)
    model = Named().double()
    values = tuple(torch.randn(4, 8, dtype=torch.float64) for _ in range(11))
    graphpar.testing.assert_equivalent(model, values, {}, tp=2, sp=True)
    made = graphpar.transform(model, values, tp=1, recompute="full")
    assert torch.equal(made(*values), model(*values))
