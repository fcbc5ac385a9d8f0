"""Rules that users give for ops of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar
from graphpar.cost import CostModel
from graphpar.errors import GraphparWarning, InputError
from graphpar.passes.rules import table
from graphpar.testing import assert_equivalent

LIBRARY = "graphpar_tests"


@torch.library.custom_op(f"{LIBRARY}::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T * 2


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad @ weight * 2, grad.flatten(0, -2).T @ x.flatten(0, -2) * 2


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


scaled.register_autograd(_backward, setup_context=_setup)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = scaled(torch.relu(self.up(x)), self.down)
        return y


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    table._NAMED.pop(f"{LIBRARY}::scaled", None)


def check(sp: bool) -> str:
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    cheap = CostModel(latency_us=0.0, link_bytes_per_us=1e9, memory_bytes_per_us=1.0)
    found = assert_equivalent(model, (x,), tp=2, sp=sp, cost=cheap, atol=1e-12, rtol=1e-12)
    return str(found.program.state["down"].type)


def test_without_a_rule_it_runs_whole() -> None:
    with pytest.warns(GraphparWarning, match="scaled.default has no partitioning rule"):
        assert check(False) == "Invariant"


@pytest.mark.parametrize("sp", [False, True])
def test_with_a_rule_it_runs_on_shards(sp: bool) -> None:
    graphpar.register_rule(f"{LIBRARY}::scaled", "... k, n k -> ... n", linear=True)
    assert check(sp).startswith("Shard(1")


def test_not_linear_means_not_summed_over() -> None:
    graphpar.register_rule(f"{LIBRARY}::scaled", "... k, n k -> ... n")
    with pytest.warns(GraphparWarning, match="needs the axis up whole"):
        assert not check(False).startswith("Shard(1")


def test_a_formula_that_cannot_be_read() -> None:
    with pytest.raises(InputError, match="legal"):
        graphpar.register_rule("scaled", "a b")
