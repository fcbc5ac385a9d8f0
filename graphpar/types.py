"""Partition types: what each rank of a mesh dimension holds of a tensor, and of its gradient.

The vocabulary is that of JAX's varying-axes types and of the ``spmd_types`` package:

=========== ============================================== ==========
type        ranks hold                                     gradient
=========== ============================================== ==========
Invariant   the same value, one logical computation        Invariant
Replicate   the same value, used differently by each rank  Partial
Shard       their part of a dimension                      Shard
Partial     addends of the value                           Replicate
=========== ============================================== ==========
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Invariant:
    """Every rank holds the same value and would compute the same gradient."""

    def __str__(self) -> str:
        return "Invariant"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the same value; the gradient is the sum over ranks."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum over ranks; every rank's addend has the same gradient."""

    def __str__(self) -> str:
        return "Partial"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds its part of dimension ``dim``.

    The dimension is laid out as consecutive ``blocks`` (sizes that sum to the dimension's), each
    cut into as many equal parts as there are ranks; a rank holds its part of every block, in
    order. A plain shard has one block. Where ranks do not divide what is cut (25 heads over 8),
    every block consists of ``units`` equal units, dealt in order and as evenly as can be, the
    first ranks getting one more; 0 stands for equal parts. ``axis`` names the sharded axis for
    people; it does not take part in comparisons.
    """

    dim: int
    blocks: tuple[int, ...]
    units: int = 0
    axis: str = field(default="", compare=False, kw_only=True)

    def __str__(self) -> str:
        name = f": {self.axis}" if self.axis else ""
        blocks = f", blocks={self.blocks}" if len(self.blocks) > 1 else ""
        units = f", units={self.units}" if self.units else ""
        return f"Shard({self.dim}{name}{blocks}{units})"


Type = Invariant | Replicate | Partial | Shard

I, R, P = Invariant(), Replicate(), Partial()

_DUAL_OF_REPLICATE: dict[type, Type] = {Replicate: P, Partial: R}


def dual(kind: Type) -> Type:
    """The type of the gradient of a value of type ``kind``."""
    return _DUAL_OF_REPLICATE.get(type(kind), kind)


def letter(kind: Type) -> str:
    """``I``, ``R``, ``P`` or ``S``."""
    return type(kind).__name__[0]


# (source, target) → (collective run in forward, collective run in backward); "" is none.
# The gradient of a conversion from a to b is the conversion from dual(b) to dual(a), so the
# table is closed: each row's transpose is another row.
CONVERSIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("I", "R"): ("", "all_reduce"),
    ("P", "I"): ("all_reduce", ""),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "I"): ("all_gather", ""),
    ("I", "S"): ("", "all_gather"),
    ("R", "S"): ("", ""),
    ("S", "P"): ("", ""),
    ("S", "S"): ("all_to_all", "all_to_all"),
}


def convertible(source: Type, target: Type) -> bool:
    """Whether a conversion from ``source`` to ``target`` exists (equal types need none)."""
    return source != target and (letter(source), letter(target)) in CONVERSIONS


def share(units: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, number) of the units that a rank gets; 0 units stand for one each."""
    low, more = divmod(units or ranks, ranks)
    return rank * low + min(rank, more), low + (rank < more)


def units_for(size: int, ranks: int) -> int:
    """The ``units`` of a :class:`Shard` along an axis of ``size``."""
    return size if size % ranks else 0


def largest_share(kind: Shard, ranks: int) -> float:
    """The part of the dimension that the first rank, which has the most, holds."""
    return share(kind.units, 0, ranks)[1] / (kind.units or ranks)


@lru_cache(maxsize=4096)
def intervals(shard: Shard, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """(start in the whole dimension, size) of each piece that the rank holds: one per block."""
    first, number = share(shard.units, rank, ranks)
    found, start = [], 0
    for block in shard.blocks:
        unit = block // (shard.units or ranks)
        found.append((start + first * unit, number * unit))
        start += block
    return tuple(found)


def local_size(shard: Shard, rank: int, ranks: int) -> int:
    """The size of the sharded dimension on one rank."""
    return sum(size for _, size in intervals(shard, rank, ranks))


def local_shape(shape: Sequence[int], kind: Type, rank: int, ranks: int) -> tuple[int, ...]:
    """The shape that ``rank`` holds of a tensor of global ``shape``."""
    sizes = list(shape)
    if isinstance(kind, Shard):
        sizes[kind.dim] = local_size(kind, rank, ranks)
    return tuple(sizes)


def fits(kind: Shard, shape: Sequence[int], ranks: int) -> bool:
    """Whether a tensor of global ``shape`` can be laid out so: no rank goes without a part."""
    return (
        0 <= kind.dim < len(shape)
        and sum(kind.blocks) == shape[kind.dim]
        and min(kind.blocks, default=0) > 0
        and all(size % (kind.units or ranks) == 0 for size in kind.blocks)
        and (kind.units == 0 or (kind.units > ranks and kind.units % ranks != 0))
    )


def layout_arguments(kind: Shard, group: str) -> tuple[Any, ...]:
    """The last arguments of an op that is told how its operand lies."""
    return (kind.dim, kind.blocks, group, *((kind.units,) if kind.units else ()))


def split_layout(args: Sequence[Any]) -> tuple[list[Any], Shard, str]:
    """The op's own arguments, the layout and the group: from what ends in
    :func:`layout_arguments`."""
    units = 0 if isinstance(args[-1], str) else args[-1]
    *rest, dim, blocks, group = args if isinstance(args[-1], str) else args[:-1]
    return rest, Shard(int(dim), tuple(map(int, blocks)), int(units)), group


def cut(x: Tensor, shard: Shard, rank: int, ranks: int) -> Tensor:
    """Rank ``rank``'s part of the whole tensor ``x`` (a view where the layout allows it)."""
    dim, blocks = shard.dim, shard.blocks
    if len(set(blocks)) == 1 and len(blocks) > 1 and not shard.units:
        parts = x.unflatten(dim, (len(blocks), ranks, blocks[0] // ranks))
        whole: Tensor = parts.select(dim + 1, rank)
        return whole.flatten(dim, dim + 1)
    pieces = [x.narrow(dim, *piece) for piece in intervals(shard, rank, ranks)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def join(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole tensor from all ranks' parts: the inverse of :func:`cut`."""
    if len(shard.blocks) == 1:
        return torch.cat(list(parts), shard.dim)
    ranks = len(parts)
    sizes = [[n for _, n in intervals(shard, r, ranks)] for r in range(ranks)]
    pieces = [part.split(own, shard.dim) for part, own in zip(parts, sizes, strict=True)]
    blocks = range(len(shard.blocks))
    return torch.cat([pieces[r][b] for b in blocks for r in range(ranks)], shard.dim)
