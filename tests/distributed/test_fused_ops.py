"""Fused ops on real ranks: the values and gradients of their parts, and when collectives run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from graphpar import ops
from graphpar.types import P, Shard, cut, layout_arguments
from tests.distributed.harness import run_threads

LAYOUTS = [
    Shard(0, (6,)),
    Shard(1, (6, 12)),
    Shard(1, (10,), 5),
    Shard(2, (6,)),
    Shard(0, (5,), 5),
]
Run = Callable[..., list[Tensor]]


def fused_gather(kind: Shard, group: str, keep: bool, x: Tensor, *operands: Any) -> list[Tensor]:
    weights, biases = operands[:3], operands[3:]
    dim, blocks, *_ = layout_arguments(kind, group)
    return ops.gather_linear(x, weights, biases, dim, blocks, group, kind.units, keep)


def plain_gather(kind: Shard, group: str, keep: bool, x: Tensor, *operands: Any) -> list[Tensor]:
    whole = ops.all_gather(x, kind.dim, kind.blocks, "R", group, kind.units)
    return [linear(whole, w, b) for w, b in zip(operands[:3], operands[3:], strict=True)]


def fused_convert(kind: Shard, group: str, keep: bool, x: Tensor, *operands: Any) -> list[Tensor]:
    return ops.convert_linear(x, operands[:3], operands[3:], group)


def plain_convert(kind: Shard, group: str, keep: bool, x: Tensor, *operands: Any) -> list[Tensor]:
    whole = ops.convert(x, group)
    return [linear(whole, w, b) for w, b in zip(operands[:3], operands[3:], strict=True)]


def fused_scatter(kind: Shard, group: str, keep: bool, x: Tensor, *operands: Any) -> list[Tensor]:
    weight, bias = operands[2], operands[-1]
    return [ops.linear_scatter(x, weight, bias, *layout_arguments(kind, group))]


def plain_scatter(kind: Shard, group: str, keep: bool, x: Tensor, *operands: Any) -> list[Tensor]:
    part = ops.redistribute(linear(x, operands[2]), P, kind, group)
    return [part if operands[-1] is None else part + operands[-1]]


PAIRS: dict[str, tuple[Run, Run]] = {
    "gather": (fused_gather, plain_gather),
    "convert": (fused_convert, plain_convert),
    "scatter": (fused_scatter, plain_scatter),
}


def operands(seed: int, columns: int, trained: str) -> list[Any]:
    """Three weights, two laid out [k, n], and three biases, of which one is none."""
    torch.manual_seed(seed)
    weights = [torch.randn(n, columns, dtype=torch.float64) for n in (3, 4, 8)]
    weights[1:] = [torch.randn(columns, n, dtype=torch.float64).t() for n in (4, 8)]
    biases = [torch.randn(n, dtype=torch.float64) for n in (3, 8)]
    made: list[Any] = [*weights, biases[0], None, biases[1]]
    for flag, value in zip(trained, [w for w in made if w is not None], strict=False):
        value.requires_grad_(flag == "1")
    return made


def check(rank: int, group: str, ranks: int) -> None:
    for kind in LAYOUTS:
        for name, trained, keep in (
            ("gather", "x11111", False),
            ("gather", "x10101", True),
            ("gather", "-01000", False),
            ("convert", "x11111", False),
            ("convert", "x00000", False),
            ("scatter", "x11111", False),
            ("scatter", "-00001", False),
        ):
            if name != "scatter" or kind.dim < 2:  # a bias has the last dimension
                compare(rank, group, ranks, kind, name, trained, keep)


def compare(
    rank: int, group: str, ranks: int, kind: Shard, name: str, trained: str, keep: bool
) -> None:
    """Values, gradients, and gradients of these, of the fused op and of its parts."""
    torch.manual_seed(7)
    sizes = [2, 3, 4]
    sizes[kind.dim] = sum(kind.blocks)
    whole = torch.randn(*sizes, dtype=torch.float64)
    x = cut(whole, kind, rank, ranks) if name == "gather" else whole
    values = operands(8 + rank, sizes[-1], trained[1:])
    results = []
    for run in PAIRS[name]:
        own = x.detach().clone().requires_grad_(trained[0] == "x")
        leaves = [own, *(v for v in values if v is not None)]
        leaves = [v for v in leaves if v.requires_grad]
        out = run(kind, group, keep, own, *values)
        loss = sum((o.sin() * (rank + 1)).sum() for o in out[-2:] if o.requires_grad)
        assert isinstance(loss, Tensor)
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        of_first = sum(g.square().sum() for g in first if g is not None)
        assert isinstance(of_first, Tensor)
        second: Any = torch.autograd.grad(of_first, leaves, retain_graph=True, allow_unused=True)
        plain = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append([*out, *first, *plain, *second])
    for ours, theirs in zip(*results, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_fused_ops_are_their_parts(ranks: int) -> None:
    run_threads(ranks, check, ranks)
