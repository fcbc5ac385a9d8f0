"""Gradient modes, autocast, batch norm, random numbers and computed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.unit.trace_checks import Lambda, check, targets, x_

aten = torch.ops.aten


def mixed(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(m.a(x)) + x
        with torch.no_grad():
            frozen = m.a(h)
        with torch.autocast("cpu", enabled=False):
            h = m.a(h.float())
        h = F.layer_norm(m.a(h), (8,)).softmax(-1) @ m.a.weight
        h = torch.einsum("ij,kj->ik", h, h) @ x
        h = torch.cat([h, x]) + F.gelu(m.a(h)).sum(-1, keepdim=True).repeat(2, 1)
        low = h + frozen.repeat(2, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        high = m.a(x)
        with torch.enable_grad():
            inner = m.a(high)
    return low, m.a(x), F.mse_loss(low[:2], x), high, inner


def inferred(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    with torch.inference_mode():
        scale = m.a(x).sum()
    return m.b(x) * (scale > 0)


def toggled(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
    torch.set_grad_enabled(False)
    z = m.a(x)
    torch.set_grad_enabled(True)
    return decorated(m, x) + m.b(x) * z


@torch.no_grad()
def decorated(m: Any, x: Tensor) -> Any:
    return m.b(x)


@pytest.mark.parametrize("fn", [inferred, toggled], ids=lambda fn: fn.__name__)
def test_gradient_modes(fn: Any) -> None:
    check(Lambda(fn), x_())


def test_dead_ops_that_draw_are_kept() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        F.dropout(x, 0.5)
        F.dropout(x, 0.0)
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        m.b(x)
        return F.dropout(m.a(x), 0.5)

    program = check(Lambda(forward), x_())
    assert [t.split(".")[1] for t in targets(program)] == [
        "dropout",
        "scaled_dot_product_attention",
        "linear",
        "dropout",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.t(),
        lambda h: h[:, None].expand(2, 3, 8),
        lambda h: h.view(2, 2, 2, 2).permute(2, 0, 3, 1),
        lambda h: h[:, :5].t(),
        lambda h: h.view(2, 1, 8).transpose(0, 2),
    ],
)
def test_dropout_draws_in_the_order_of_memory(change: Any) -> None:
    check(Lambda(lambda m, x, y, flag: F.dropout(change(m.a(x)), 0.5)), x_())


@contextmanager
def ambient() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("around", [nullcontext, ambient])
def test_autocast(around: Any) -> None:
    with around():
        program = check(Lambda(mixed), x_())
    assert "aten.to.dtype" in targets(program)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 8, 8)
    program = check(model.train(training), x)
    names = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert program.mutations == (names if training else ())
    with torch.autocast("cpu", torch.bfloat16):
        check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(training), x)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        torch.nn.utils.spectral_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ],
)
def test_computed_weights(wrap: Any) -> None:
    check(wrap(nn.Linear(8, 8)), x_())
