"""The conversions on the tensors of all ranks in one process: what the collectives mean.

One autograd function takes all ranks' tensors, so that gradients follow the types: plain autograd
through ``cat`` and ``sum`` would add up an Invariant value's gradients and hide a missing f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from graphpar.errors import InternalError
from graphpar.ops.sharded import SHARDED, Place, Reduction
from graphpar.types import (
    P,
    Shard,
    Type,
    convertible,
    cut,
    dual,
    join,
    letter,
    split_layout,
)


def redistribute(parts: Sequence[Tensor], source: Type, target: Type) -> list[Tensor]:
    """All ranks' tensors of type ``source`` (rank by rank) converted to ``target``.

    The results share no memory with each other or with ``parts``. The gradient is the conversion
    from dual(target) to dual(source), itself differentiable.
    """
    if source == target:
        return list(parts)
    if not convertible(source, target):
        raise InternalError(f"no conversion from {source} to {target}")
    apply = cast(Any, _Redistribute).apply
    return list(apply(source, target, *parts))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Type, target: Type, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.types = source, target
        return tuple(_convert(parts, source, target))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        source, target = ctx.types
        return None, None, *redistribute(grads, dual(target), dual(source))


def _convert(parts: Sequence[Tensor], source: Type, target: Type) -> list[Tensor]:
    ranks = len(parts)
    if letter(source) + letter(target) == "SP":
        assert isinstance(source, Shard)
        return [_pad(part, source, rank, ranks) for rank, part in enumerate(parts)]
    if isinstance(source, Shard):
        values = [join(parts, source)] * ranks
    elif letter(source) == "P":
        values = [torch.stack(list(parts)).sum(0)] * ranks
    else:
        values = list(parts)
    if isinstance(target, Shard):
        values = [cut(value, target, rank, ranks) for rank, value in enumerate(values)]
    return [value.clone(memory_format=torch.contiguous_format) for value in values]


def _pad(part: Tensor, shard: Shard, rank: int, ranks: int) -> Tensor:
    shape = list(part.shape)
    shape[shard.dim] = sum(shard.blocks)
    zeros = part.new_zeros(shape)
    return join([part if r == rank else cut(zeros, shard, r, ranks) for r in range(ranks)], shard)


def on_all_ranks(name: str, calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    """An op of :mod:`graphpar.ops.sharded` on every rank; ``calls`` are the ranks' arguments."""
    steps = []
    for rank, args in enumerate(calls):
        rest, layout, _ = split_layout(args)
        steps.append(SHARDED[name](Place(layout, rank, len(calls)), *rest))
    given: list[Any] = [None] * len(calls)
    while True:
        asked, results = [], []
        for each, value in zip(steps, given, strict=True):
            try:
                asked.append(each.send(value))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return results
        given = _reduce([x for x, _ in asked], asked[0][1])


def _reduce(parts: list[Tensor], kind: Reduction) -> list[Tensor]:
    if kind == "max":
        top = torch.stack(parts).amax(0)
        return [top.clone() for _ in parts]
    return redistribute(parts, P, kind)
