"""torch.autograd.Function keeps its backward, and runs on shards where it is pointwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.errors import GraphparWarning, TraceError
from graphpar.interpret import model_state, run
from graphpar.passes.rules import rule_for
from graphpar.testing import assert_equivalent
from graphpar.trace import trace


class Straight(torch.autograd.Function):
    """Rounds; its gradient is the identity's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Scaled(torch.autograd.Function):
    """Two inputs, a number, two results and a ``None``; reversed gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * y, None, y.exp() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return -grads[0] * ctx.scale, grads[0] * x + grads[2], None


class RowNorm(torch.autograd.Function):
    """Not pointwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = x / x.norm(dim=-1, keepdim=True)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Averaged(torch.autograd.Function):
    """Elementwise, but for a number that it takes from the size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].shape[-1]


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Chooses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Model(nn.Module):
    """``fn`` between two projections."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.fn(self.up(x) * 3))
        return y


def scaled(x: Tensor) -> Tensor:
    a, none, b = Scaled.apply(x, x * 2, 0.5)  # type: ignore[no-untyped-call]
    assert none is None
    c, _, d = Scaled.apply(x, x, 0.25)  # type: ignore[no-untyped-call]
    total: Tensor = a + b + c * d
    return total


FUNCTIONS: list[Any] = [Straight.apply, scaled, RowNorm.apply]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_bitwise(fn: Any) -> None:
    torch.manual_seed(0)
    model, x = Model(fn), torch.randn(2, 4, 8)
    program = trace(model, (x,))
    for _ in range(2):
        found = run(program, model_state(model), [x])[0]
        wanted = model(x)
        assert torch.equal(found, wanted)
        for a, b in zip(
            torch.autograd.grad(found.square().sum(), list(model.parameters())),
            torch.autograd.grad(wanted.square().sum(), list(model.parameters())),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("fn", FUNCTIONS[:2])
def test_a_pointwise_function_runs_on_shards(fn: Any, sp: bool) -> None:
    torch.manual_seed(0)
    model = Model(fn).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    result = assert_equivalent(model, (x,), tp=2, sp=sp, atol=1e-12, rtol=1e-12)
    own = [n for n in result.program.graph.nodes if "graphpar_functions" in str(n.target)]
    assert own
    assert all(rule_for(n.target) for n in own)
    assert str(result.program.state["down.weight"].type).startswith("Shard")


@pytest.mark.parametrize("function", [RowNorm, Averaged])
def test_another_function_is_gathered_with_a_warning(function: Any) -> None:
    torch.manual_seed(0)
    model = Model(function.apply).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    says = rf"{function.__name__}_\d+\.default has no partitioning rule"
    with pytest.warns(GraphparWarning, match=says):
        assert_equivalent(model, (x,), tp=2, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("function", "says"),
    [(Writes, "writes to its arguments"), (Draws, "random numbers"), (Chooses, "fake tensors")],
)
def test_refused(function: Any, says: str) -> None:
    with pytest.raises(TraceError, match=f"backward of {function.__name__}.*would be lost.*{says}"):
        trace(Model(function.apply), (torch.randn(2, 4, 8),))
