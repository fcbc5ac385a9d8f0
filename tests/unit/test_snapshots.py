"""Buffers that a forward writes, read by what comes later: backward, a second run, the caller."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import graphpar
from graphpar.cost import SavedTensors, dry_run
from graphpar.errors import TraceError
from graphpar.printer import format_python
from graphpar.snapshots import SNAPSHOT


class Average(nn.Module):
    """Scales by a running average, whose name is also that of an op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.ones(16))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh()
        z = y * self.mean.clone()
        with torch.no_grad():
            self.mean.lerp_(y.abs().mean((0, 1)), 0.1)
        return x + self.down(z)  # type: ignore[no-any-return]


class Assigned(Average):
    """The buffer gets a new tensor: autograd keeps the old one without a copy."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh()
        z = y * self.mean[None, :]
        self.mean = 0.9 * self.mean + 0.1 * y.detach().abs().mean((0, 1))
        return x + self.down(z)  # type: ignore[no-any-return]


class Returned(Average):
    """The old values, the new ones, and a part of them."""

    def forward(self, x: Tensor) -> Any:
        old = self.mean.clone()
        self.mean.mul_(2)
        return self.down(self.up(x)), old, self.mean, old[1:]


def spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(8, 8))


MODELS: dict[str, Any] = {
    "average": lambda: nn.Sequential(*(Average() for _ in range(3))),
    "assigned": lambda: nn.Sequential(Assigned(), Assigned()),
    "returned": Returned,
    "spectral": lambda: nn.Sequential(spectral(), nn.GELU(), spectral()),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4), nn.Linear(8, 8)),
}


def steps(model: nn.Module, x: Tensor, count: int) -> list[Tensor]:
    """Some forwards before the backward of all; outputs, gradients and buffers."""
    outputs, losses = [], []
    for _ in range(count):
        for y in pytree.tree_leaves(model(x)):
            outputs.append(y.detach().clone())
            losses += [y.square().sum()] if y.requires_grad else []
    torch.stack(losses).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*outputs, *grads, *model.buffers()]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_old_values_stay(name: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    wanted = steps(copy.deepcopy(model), x, 2)
    parallel = graphpar.transform(model, (x,), tp=1, recompute=recompute)
    for found, value in zip(steps(parallel, x, 2), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
    graphs = [graph for _, graph in parallel.program.graphs()]
    copies = [n for graph in graphs for n in graph.nodes if n.target is SNAPSHOT]
    assert bool(copies) == (recompute == "full" or name not in ("spectral", "batch norm"))
    with SavedTensors(parallel.local_tensors().values()) as saved:
        output = parallel(x)
        assert output is not None
        assert saved.nbytes == dry_run(parallel.program).saved_bytes


@pytest.mark.parametrize("name", ["average", "returned"])
def test_on_shards(name: str) -> None:
    model, x = MODELS[name]().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    graphpar.testing.assert_equivalent(model, (x,), tp=2, sp=True)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled(recompute: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS["average"](), torch.randn(2, 4, 8)
    wanted = steps(copy.deepcopy(model), x, 2)
    parallel = graphpar.transform(model, (x,), tp=1, recompute=recompute)
    compiled: Any = torch.compile(parallel, backend="aot_eager", fullgraph=True)
    for found, value in zip(steps(compiled, x, 2), wanted, strict=True):
        torch.testing.assert_close(found, value)


class Replaced(nn.Module):
    def __init__(self, after: Any) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.after(x)
        return x * 2


@pytest.mark.parametrize(
    ("after", "form"),
    [
        (lambda x: x[0], r"\[3\] of torch.float32"),
        (lambda x: x[0, :2].int(), r"\[2\] of torch.int32"),
        (lambda x: None, "None"),
    ],
)
def test_a_buffer_of_another_form_is_an_error(after: Any, form: str) -> None:
    model = nn.Sequential(Replaced(after))
    message = rf"replaces the buffer 0\.seen, \[2\] of torch.float32, by {form}; legal: "
    with pytest.raises(TraceError, match=message) as found:
        graphpar.transform(model, (torch.ones(2, 3),), tp=1)
    assert "test_snapshots.py:" in str(found.value.__notes__)


@pytest.mark.parametrize("nested", [False, True])
def test_a_buffer_that_is_filled_is_an_error_and_stays_none(nested: bool) -> None:
    model: nn.Module = Replaced(lambda x: x[0, :2])
    model.seen = None  # type: ignore[assignment]
    whole = nn.Sequential(model) if nested else model
    with pytest.raises(TraceError, match=r"seen, None, by \[2\] of torch.float32; legal: "):
        graphpar.transform(whole, (torch.ones(2, 3),), tp=1)
    assert model.seen is None


def test_a_printed_program_defines_its_ops() -> None:
    program = graphpar.transform(MODELS["average"](), (torch.ones(2, 4, 8),), tp=1).program
    assert "\nimport graphpar.snapshots\n" in format_python(program)


def test_a_buffer_with_two_names_is_not_replaced() -> None:
    model = nn.Sequential(Replaced(lambda x: x[0, :2]), Replaced(lambda x: x[0, :2]))
    model[1].seen = model[0].seen
    with pytest.raises(TraceError, match=r"the buffer 0\.seen, which has several names"):
        graphpar.transform(model, (torch.ones(2, 3),), tp=1)
