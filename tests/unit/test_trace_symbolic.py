"""Calls that differ in sizes: few exports, and the program that a trace of its own would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar
from graphpar.errors import TraceError
from graphpar.program import program_hash
from graphpar.trace import Tracer, trace
from tests import zoo


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each export."""
    real = torch.export.export
    seen: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return seen


def resized(kwargs: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """The zoo's inputs with another batch and sequence."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = [batch, *value.shape[1:]]
        if len(shape) > 1 and shape[1] == zoo.SEQ:
            shape[1] = length
        if value.is_floating_point():
            return torch.randn(shape, dtype=value.dtype)
        return torch.randint(0, 2, shape)

    return {name: change(value) for name, value in kwargs.items()}


QUICK = ("gpt2", "vit", "lstm", "nanogpt")
MODELS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in zoo.BUILDERS]


@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_that_of_its_own_trace(name: str, exports: list[int]) -> None:
    model, kwargs = zoo.build(name)
    tracer = Tracer()
    own = 0
    for batch, length in ((2, 16), (3, 12), (4, 10), (1, 12), (5, 9)):
        call = resized(kwargs, batch, length)
        before = len(exports)
        program = tracer.trace(model, (), call)
        own += len(exports) - before
        assert program_hash(program) == program_hash(trace(model, (), call))
    if name != "lstm":  # aten.lstm fixes the sequence
        assert own <= 3  # the first, the one with symbols, the one of batch 1


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if x.shape[1] > 4 else y


def test_a_branch_on_a_size_is_its_own_trace(exports: list[int]) -> None:
    torch.manual_seed(0)
    model = Branching()
    parallel = graphpar.transform(model, (torch.randn(2, 3, 4),), tp=1)
    for length, count in ((6, 2), (7, 2), (3, 2), (4, 3), (2, 3), (9, 3)):
        x = torch.randn(2, length, 4)
        assert torch.equal(parallel(x), model(x))
        assert len(exports) == count, length


class Regions(nn.Module):
    """Autocast, no_grad, writes and numbers computed from sizes."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(x.shape[0])
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.layer(x)
        with torch.no_grad():
            scale = torch.arange(x.shape[1], dtype=torch.float32)[:, None] / x.shape[1]
        y = y.float().clone()
        y[:, : x.shape[1] // 2].mul_(2)
        return y + scale + float(x.shape[0] ** 0.5)


def test_regions_and_writes(exports: list[int]) -> None:
    torch.manual_seed(0)
    model, twin = Regions(), Regions()
    twin.load_state_dict(model.state_dict())
    parallel = graphpar.transform(model, (torch.randn(2, 3, 4),), tp=1)
    for batch, length in ((3, 5), (4, 7), (5, 8)):
        x = torch.randn(batch, length, 4)
        assert torch.equal(parallel(x), twin(x))
        assert torch.equal(parallel.state_dict()["steps"], twin.steps)
        parallel(x).sum().backward()
        twin(x).sum().backward()
        for (name, found), expected in zip(
            parallel.named_parameters(), twin.parameters(), strict=True
        ):
            assert found.grad is not None
            assert expected.grad is not None
            assert torch.equal(found.grad, expected.grad), name


class Fixed(nn.Module):
    """Uses its first size as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0] * int(x.shape[0])).sum()


def test_a_fixed_size_costs_one_try(exports: list[int]) -> None:
    tracer = Tracer()
    model = Fixed()
    for size in range(2, 8):
        call = (torch.randn(size, 3),)
        before = len(exports)
        assert program_hash(tracer.trace(model, call, {})) == program_hash(trace(model, call))
        assert len(exports) - before <= (3 if size == 3 else 2)


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.table[: x.shape[1]])


def test_a_size_that_the_model_refuses_is_an_error_and_no_more(exports: list[int]) -> None:
    tracer, model = Tracer(), Position()
    tracer.trace(model, (torch.randn(2, 3, 4),), {})
    tracer.trace(model, (torch.randn(2, 5, 4),), {})
    with pytest.raises(TraceError, match=r"broadcast|match"):
        tracer.trace(model, (torch.randn(2, 9, 4),), {})
    before = len(exports)
    tracer.trace(model, (torch.randn(2, 6, 4),), {})
    assert len(exports) == before


def test_first_call_in_inference_mode() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU())
    parallel = graphpar.transform(model, tp=1)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        y = torch.randn(2, 4)
        assert torch.equal(parallel(x), model(x))
        assert torch.equal(parallel(y), model(y))
    parallel(x).sum().backward()
    model(x).sum().backward()
    assert not any(p.is_inference() for p in parallel.parameters())
    gradient = parallel.get_parameter("0.weight").grad
    assert gradient is not None
    assert layer.weight.grad is not None
    assert torch.equal(gradient, layer.weight.grad)
