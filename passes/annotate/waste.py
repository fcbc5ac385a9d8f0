"""The work that a partition wastes: uneven parts, and products that every rank does whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from graphpar.program import Program, info, result_types
from graphpar.types import Shard, largest_share, share


@dataclass(frozen=True, slots=True)
class Uneven:
    """An axis of ``size`` units of which ranks hold ``most`` or ``least``; ``flops``: how much
    more all ranks could do while the slowest works on its part, forward, in a step."""

    axis: str
    size: int
    most: int
    least: int
    flops: int


@dataclass(frozen=True, slots=True)
class Replicated:
    """A product that each rank does whole; ``flops``: what all but one do for nothing."""

    op: str
    source: str
    flops: int


def uneven_axes(program: Program, flops: Mapping[fx.Node, int], ranks: int) -> list[Uneven]:
    """Each axis that is cut unevenly anywhere, parameters of no product included."""
    found: dict[tuple[str, int], int] = {}
    for block, node in _nodes(program):
        kinds = [*(info(node).operands or ()), *result_types(node)]
        shards = [kind for kind in kinds if isinstance(kind, Shard) and kind.units]
        for kind in shards[:1]:
            idle = largest_share(kind, ranks) * ranks - 1
            key = kind.axis, kind.units
            found[key] = found.get(key, 0) + round(
                idle * flops.get(node, 0) * program.call_count(block)
            )
    return [
        Uneven(axis, units, share(units, 0, ranks)[1], share(units, ranks - 1, ranks)[1], wasted)
        for (axis, units), wasted in found.items()
    ]


def replicated_products(
    program: Program, flops: Mapping[fx.Node, int], ranks: int
) -> list[Replicated]:
    """Products of which no operand and no result is sharded, the largest first."""
    found = []
    for block, node in _nodes(program):
        kinds = [*(info(node).operands or ()), *result_types(node)]
        if flops.get(node) and not any(isinstance(kind, Shard) for kind in kinds):
            wasted = flops[node] * program.call_count(block) * (ranks - 1)
            found.append(Replicated(str(node.target), str(info(node).source), wasted))
    return sorted(found, key=lambda each: -each.flops)


def _nodes(program: Program) -> Iterator[tuple[str, fx.Node]]:
    for block, graph in program.graphs():
        for node in graph.nodes:
            if node.op != "output":
                yield block, node
