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
    order. A plain shard has one block. ``axis`` names the sharded axis for people; it does not
    take part in comparisons.
    """

    dim: int
    blocks: tuple[int, ...]
    axis: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = f": {self.axis}" if self.axis else ""
        blocks = f", blocks={self.blocks}" if len(self.blocks) > 1 else ""
        return f"Shard({self.dim}{name}{blocks})"


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


def local_shape(shape: Sequence[int], kind: Type, ranks: int) -> tuple[int, ...]:
    """The shape one rank holds of a tensor of global ``shape``."""
    sizes = list(shape)
    if isinstance(kind, Shard):
        sizes[kind.dim] //= ranks
    return tuple(sizes)


def divides(kind: Type, ranks: int) -> bool:
    """Whether every block of ``kind`` can be cut into ``ranks`` equal parts."""
    return not isinstance(kind, Shard) or all(size % ranks == 0 for size in kind.blocks)


def cut(x: Tensor, shard: Shard, rank: int, ranks: int) -> Tensor:
    """Rank ``rank``'s part of the whole tensor ``x`` (a view where the layout allows it)."""
    if len(set(shard.blocks)) == 1:
        part = shard.blocks[0] // ranks
        if len(shard.blocks) == 1:
            return x.narrow(shard.dim, rank * part, part)
        parts = x.unflatten(shard.dim, (len(shard.blocks), ranks, part))
        whole: Tensor = parts.select(shard.dim + 1, rank)
        return whole.flatten(shard.dim, shard.dim + 1)
    blocks = x.split(list(shard.blocks), shard.dim)
    return torch.cat([b.tensor_split(ranks, shard.dim)[rank] for b in blocks], shard.dim)


def join(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole tensor from all ranks' parts: the inverse of :func:`cut`."""
    if len(shard.blocks) == 1:
        return torch.cat(list(parts), shard.dim)
    ranks = len(parts)
    sizes = [size // ranks for size in shard.blocks]
    pieces = [part.split(sizes, shard.dim) for part in parts]
    return torch.cat([pieces[r][b] for b in range(len(sizes)) for r in range(ranks)], shard.dim)
