"""From a rule and a cut axis to the partition types of an op's operands and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpar.axes import Axis, Blocks, Dims, OpAxes, Unshardable, blocks_under
from graphpar.types import I, P, R, Shard, Type, local_size


@dataclass(frozen=True, slots=True)
class Strategy:
    """One legal typing of an op: a type per tensor operand and per result."""

    operands: tuple[Type, ...]
    results: tuple[Type, ...]


def uniform(op: OpAxes, kind: Type) -> Strategy:
    """All Invariant, or all Replicate: the op runs whole on every rank."""
    return Strategy((kind,) * len(op.operands), (kind,) * len(op.results))


def sharding(dims: Dims, cuts: Mapping[Axis, Blocks], units: int = 0) -> Shard | None:
    """The Shard of a tensor whose axes are cut as given; ``None`` if it has none of them."""
    found: Shard | None = None
    for index, dim in enumerate(dims):
        blocks = blocks_under(dim, cuts)
        if blocks is not None:
            if found is not None:
                raise Unshardable
            found = Shard(index, blocks, units, axis="·".join(map(str, cuts)))
    return found


def shard_strategy(
    op: OpAxes, cuts: Mapping[Axis, Blocks], ranks: int, units: int = 0
) -> Strategy | None:
    """The local execution of the op with some axes cut; ``None`` where that is not legal.

    ``units`` as in :class:`graphpar.types.Shard`.
    Operands without a cut axis are Replicate. A result without a cut axis is Partial if a cut
    axis was contracted, Invariant if the op reduced over it by itself.
    """
    if op.opaque or not op.whole.isdisjoint(cuts):
        return None
    if any(size % (units or ranks) for blocks in cuts.values() for size in blocks):
        return None
    rest: Type | None = None
    if not op.contracted.isdisjoint(cuts):
        rest = P
    elif not op.reduced.isdisjoint(cuts):
        rest = I
    try:
        operands = tuple(sharding(dims, cuts, units) or R for dims in op.operands)
        results = tuple(sharding(dims, cuts, units) or rest for dims in op.results)
    except Unshardable:
        return None
    if any(not _aligned(kind, op.multiple, ranks) for kind in (*operands, *results)):
        return None
    # A sum over one cut axis in a result that is cut along another would be lost.
    if None in results or (rest == P and any(r != P for r in results)):
        return None
    return Strategy(operands, tuple(r for r in results if r is not None))


def _aligned(kind: Type | None, multiple: int, ranks: int) -> bool:
    if multiple == 1 or not isinstance(kind, Shard):
        return True
    return all(local_size(kind, rank, ranks) % multiple == 0 for rank in range(ranks))


def partial_strategies(op: OpAxes) -> list[Strategy]:
    """The ways in which Partial passes through the op."""
    results = (P,) * len(op.results)
    places = range(len(op.operands))
    return [
        Strategy(tuple(P if i in through else R for i in places), results) for through in op.partial
    ]


def uniform_strategies(op: OpAxes) -> list[Strategy]:
    return [uniform(op, I), uniform(op, R)]
