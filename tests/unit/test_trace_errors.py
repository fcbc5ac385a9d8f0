"""What cannot be traced is an error that names the user's line; what is lost is a warning."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import (
    checkpoint as composable_checkpoint,
)
from torch.utils.checkpoint import checkpoint

from graphpar.errors import GraphparWarning, InputError, TraceError
from graphpar.trace import trace
from tests import zoo
from tests.unit.trace_checks import Lambda, call, check, targets, x_

aten = torch.ops.aten


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def doubled(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    return Doubled.apply(m.a(x))  # type: ignore[no-untyped-call]


def seeded(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    torch.manual_seed(0)
    return m.a(x) * torch.rand(8)


def forked(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    with torch.random.fork_rng():
        return m.a(x)


def own_gradient(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    x = x.detach().requires_grad_()
    return m.b(torch.autograd.grad(m.a(x).sum(), x)[0])


def own_backward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    m.a(x).sum().backward()
    return m.b(x)


def hooked(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
    h: Tensor = m.a(x)
    h.register_hook(lambda g: g * 2)
    return h


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda m, x, y, flag: m.a(x) if x.sum() > 0 else x, "torch.where"),
        (lambda m, x, y, flag: m.a(x) * x.sum().item(), "values of tensors"),
        (lambda m, x, y, flag: m.a(x)[: int(x.sum())], "values of tensors"),
        (lambda m, x, y, flag: m.a(x)[x > 0], "values of tensors"),
        (lambda m, x, y, flag: x.nonzero(), "values of tensors"),
        (
            lambda m, x, y, flag: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, (x,)),
            "values of tensors",
        ),
        (lambda m, x, y, flag: Box(x), "register_pytree_node"),
        (doubled, "Doubled"),
        (seeded, "seeded"),
        (forked, "seeded"),
        (own_gradient, "gradient is computed"),
        (own_backward, "gradient is computed"),
        (lambda m, x, y, flag: torch.vmap(m.a)(x), "torch.func"),
        (lambda m, x, y, flag: m.a(x).to_sparse(), "sparse"),
        (
            lambda m, x, y, flag: torch.rand(8, generator=torch.Generator().manual_seed(0)),
            "torch.Generator",
        ),
        (hooked, "hook"),
        (lambda m, x, y, flag: m.a(x) + m.nothing, "AttributeError"),
        (lambda m, x, y, flag: m.a(x) @ torch.ones(3, 3), "RuntimeError"),
    ],
)
def test_errors_name_the_line(fn: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        trace(Lambda(fn), (x_(),))
    after = ("register_pytree_node", "torch.Generator")  # found after the forward
    if says not in after:
        assert "test_trace_errors.py:" in caught.value.__notes__[0]


def test_errors_leave_torch_and_the_model_as_they_were() -> None:
    model = Lambda(doubled)
    apply, setter = torch.autograd.Function.apply, nn.Module.__setattr__
    with pytest.raises(TraceError):
        trace(model, (x_(),))
    assert torch.autograd.Function.apply == apply
    assert nn.Module.__setattr__ is setter
    assert not model._forward_hooks
    assert model(x_()).grad_fn is not None


def test_cache_in_the_output() -> None:
    model, kwargs = zoo.build("gpt2", layers=1)
    with pytest.raises(TraceError, match="use_cache=False"):
        trace(model, (), {**kwargs, "use_cache": True})


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"unexpected.*'z'.*flag"):
        trace(Lambda(lambda m, x, y, flag: x), (x_(),), {"z": 1})
    with pytest.raises(InputError, match=r"missing.*'x'"):
        trace(Lambda(lambda m, x, y, flag: x))


def test_tensor_attribute_with_gradients() -> None:
    model = Lambda(lambda m, x, y, flag: m.a(x) * m.loose)
    model.loose = torch.ones(8, requires_grad=True)
    with pytest.raises(TraceError, match="loose"):
        trace(model, (x_(),))


def remembers(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
    m.state = m.a(x).detach() + m.state
    return m.state * x  # type: ignore[no-any-return]


def test_state_outside_buffers() -> None:
    model = Lambda(remembers)
    model.state = torch.zeros(2, 8)
    with pytest.raises(TraceError, match=r"state.*buffer"):
        trace(model, (x_(),))


def test_module_hooks() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    check(model, x_())
    model[0].register_full_backward_hook(lambda module, a, b: None)
    with pytest.raises(TraceError, match="backward hook"):
        trace(model, (x_(),))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_dropped_with_a_warning(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        return checkpoint(m.a, m.b(x), use_reentrant=reentrant)

    model = Lambda(forward)
    with pytest.warns(GraphparWarning, match=r"activation checkpointing[^$]*test_trace_errors.py:"):
        program = trace(model, (x_(),))
    assert targets(program) == ["aten.linear.default"] * 2
    x = x_()
    call(program, model, x).sum().backward()
    assert model.a.bias.grad is not None


def test_composable_checkpointing_is_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    composable_checkpoint(model[0])
    with pytest.warns(GraphparWarning, match="activation checkpointing"):
        program = trace(model, (x_(),))
    assert targets(program) == ["aten.linear.default"] * 2


@pytest.mark.filterwarnings("ignore:the forward asks whether gradients are enabled")
def test_transformers_checkpointing_is_seen() -> None:
    model, kwargs = zoo.build("llama", layers=1)
    model.activation_checkpointing_enable()  # type: ignore[operator]
    with pytest.warns(GraphparWarning, match="activation checkpointing"):
        trace(model, (), kwargs)


def test_changed_attributes_warn() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        m.calls += 1
        return m.a(x) * m.calls

    model = Lambda(forward)
    model.calls = 0  # type: ignore[assignment]
    with pytest.warns(GraphparWarning, match="calls"):
        trace(model, (x_(),))


def test_the_question_whether_gradients_are_enabled_warns() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        with torch.no_grad():
            scale = 1 if torch.is_grad_enabled() else 2  # no answer that could be another
        return m.a(x) * (scale if torch.is_grad_enabled() else 3)

    with pytest.warns(GraphparWarning, match="whether gradients are enabled") as found:
        trace(Lambda(forward), (x_(),))
    assert len(found) == 1
    assert "is_grad_enabled() else 3)" in str(found[0].message)


def test_random_numbers_of_python_warn() -> None:
    state = random.getstate()
    with pytest.warns(GraphparWarning, match="random numbers outside torch"):
        trace(Lambda(lambda m, x, y, flag: m.a(x) * random.random()), (x_(),))
    assert random.getstate() == state


def test_a_models_own_warnings_come_through() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        warnings.warn("mine", DeprecationWarning, stacklevel=1)
        return m.a(x)

    with pytest.warns(DeprecationWarning, match="mine"):
        trace(Lambda(forward), (x_(),))


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 4)], ids=["overlapping", "apart"])
def test_a_buffer_within_another_is_not_written(part: slice) -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        m.first.mul_(2.0)
        return m.a(x) * m.second.sum()

    model, whole = Lambda(forward), torch.ones(4)
    model.register_buffer("first", whole[:2])
    model.register_buffer("second", whole[part])
    if part.start:
        trace(model, (x_(),))
        return
    with pytest.raises(TraceError, match=r"buffer first, which shares memory with second"):
        trace(model, (x_(),))
