"""Ops that PyTorch composes of others: taken apart, with the same bits, into ops with rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.interpret import model_state, run
from graphpar.passes.rules import rule_for
from graphpar.program import Program, is_getitem
from graphpar.testing import assert_equivalent
from graphpar.trace import trace

Fn = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn
        self.w = nn.Parameter(torch.randn(8, 8))
        self.v = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


COMPOSITE: dict[str, Fn] = {
    "movedim": lambda m, x: (x * m.v).movedim(0, 2),
    "mT": lambda m, x: m.w.mT @ x.mT,
    "outer": lambda m, x: torch.outer(m.v, m.v) + x.sum(),
    "var_mean": lambda m, x: torch.var_mean(x * m.v, -1)[0],
    "tensor_split": lambda m, x: torch.tensor_split(x * m.v, 3, -1)[1],
    "vstack": lambda m, x: torch.vstack([x * m.v, x]),
    "tile": lambda m, x: (x * m.v).tile(2),
    "take_along_dim": lambda m, x: torch.take_along_dim(x * m.v, x.argsort(-1), -1),
    "inner": lambda m, x: torch.inner(x, m.w),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, 1),
    "kron": lambda m, x: torch.kron(m.w, x[0]),
    "cosine_similarity": lambda m, x: F.cosine_similarity(x * m.v, x + 1, -1),
    "linalg_norm": lambda m, x: torch.linalg.norm(x * m.v, dim=-1),
    "nanmean": lambda m, x: (x * m.v).nanmean(-1),
    "prelu": lambda m, x: F.prelu(x, m.v[:4]),
    "group_norm": lambda m, x: F.group_norm(x * m.v, 2, m.v[:4], m.v[4:]),
    "max_pool1d": lambda m, x: F.max_pool1d(x * m.v, 2),
    "avg_pool1d": lambda m, x: F.avg_pool1d(x * m.v, 2),
    "adaptive_avg_pool1d": lambda m, x: F.adaptive_avg_pool1d(x * m.v, 2),
    "interpolate": lambda m, x: F.interpolate(x * m.v, scale_factor=2, mode="linear"),
    "conv_transpose1d": lambda m, x: F.conv_transpose1d(x, m.w[:4, :6].reshape(4, 3, 2)),
    "kl_div": lambda m, x: F.kl_div(x * m.v, x.exp(), reduction="sum"),
    "margin_ranking_loss": lambda m, x: F.margin_ranking_loss(x * m.v, x, x.sign()),
    "poisson_nll_loss": lambda m, x: F.poisson_nll_loss(x * m.v, x.exp()),
    "triplet_margin_loss": lambda m, x: F.triplet_margin_loss(x[0] * m.v, x[1], x[0]),
    "real": lambda m, x: torch.real(torch.complex(x * m.v, x)),
    "rfft": lambda m, x: torch.fft.rfft(x * m.v, dim=-1).abs(),
    "diag": lambda m, x: torch.diag(m.w) * x,
    "cdist": lambda m, x: torch.cdist(x * m.v, x + 1),
    "multi_dot": lambda m, x: torch.linalg.multi_dot([x[0], m.w, m.w]),
    "meshgrid": lambda m, x: torch.meshgrid(m.v, x[0, 0], indexing="ij")[0] * m.w,
    "trapezoid": lambda m, x: torch.trapezoid(x * m.v),
    "msort": lambda m, x: (x * m.v).msort(),
    "glu": lambda m, x: F.glu(x * m.v, -1),
    "einsum": lambda m, x: torch.einsum("...d,de->...e", x, m.w),
}


def results(call: Callable[[Tensor], Tensor], model: Model, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    out = call(x)
    wanted = [x, model.w, model.v]
    return [
        out.detach(),
        *torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True),
    ]


def check(model: Model, program: Program, x: Tensor) -> None:
    def traced(y: Tensor) -> Any:
        return run(program, model_state(model), [y])[0]

    pairs = zip(results(traced, model, x), results(model, model, x), strict=True)
    for found, expected in pairs:
        if found is None or expected is None:
            assert found is expected
        else:
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", COMPOSITE)
def test_parts_have_rules_and_give_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(COMPOSITE[name]), torch.randn(2, 4, 8)
    program = trace(model, (x,))
    calls = [n for n in program.graph.nodes if n.op == "call_function" and not is_getitem(n)]
    assert calls
    assert [n.target for n in calls if rule_for(n.target) is None] == []
    check(model, program, x)


@pytest.mark.parametrize("name", ["cosine_similarity", "tensordot", "kl_div", "prelu", "multi_dot"])
def test_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    inner = COMPOSITE[name]

    def fn(m: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(m, x)

    model, x = Model(fn), torch.randn(2, 4, 8)
    check(model, trace(model, (x,)), x)


def test_recurrences_stay_whole() -> None:
    program = trace(nn.LSTM(4, 4), (torch.randn(3, 2, 4),))
    assert torch.ops.aten.lstm.input in {n.target for n in program.graph.nodes}


class Between(nn.Module):
    """A composite op between two projections."""

    def __init__(self, fn: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.fn = fn
        self.up, self.down = nn.Linear(8, 16), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.fn(self.up(x)))
        return y


@pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    ("fn", "width"),
    [
        (lambda x: F.glu(x, -1), 8),
        (lambda x: torch.vstack([x, x]), 16),
        (lambda x: F.avg_pool1d(x.mT, 2).mT, 16),
        (lambda x: F.group_norm(x, 2), 16),
        (lambda x: torch.roll(x, 1, 1), 16),
        (lambda x: x.unfold(1, 2, 2).flatten(2), 32),
        (lambda x: torch.einsum("...i,...j->...ij", x, x).sum(-1), 16),
    ],
)
def test_between_projections(fn: Callable[[Tensor], Tensor], width: int, sp: bool) -> None:
    torch.manual_seed(0)
    model = Between(fn, width).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    assert_equivalent(model, (x,), tp=2, sp=sp, atol=1e-12, rtol=1e-12)
