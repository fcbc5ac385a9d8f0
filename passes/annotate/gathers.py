"""Ops that undo a sharding: they need an axis whole along which their operand is cut."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphpar.axes import Axis, Dims, match_blocks
from graphpar.passes.rules import tensor_arguments
from graphpar.program import Program, info
from graphpar.types import Shard


def forced_gathers(
    program: Program, features: frozenset[Axis], ranks: int
) -> Iterator[tuple[fx.Node, Axis]]:
    """Each op, with the feature axis that it makes the planner gather.

    Needs types and operand types. Gathers along tokens, which sequence parallelism makes at
    every layer, are not among them.
    """
    for _, graph in program.graphs():
        for node in graph.nodes:
            op, wanted = info(node).axes, info(node).operands
            if node.op != "call_function" or op is None or wanted is None:
                continue
            for operand, kind in zip(tensor_arguments(node), wanted, strict=True):
                cut = _cut_axes(operand, ranks) if not isinstance(kind, Shard) else set()
                undone = sorted(cut & op.whole & features, key=lambda a: a.id)
                if undone:
                    yield node, undone[0]
                    break


def _cut_axes(node: fx.Node, ranks: int) -> set[Axis]:
    """The axes along which a computed value is sharded."""
    kind, dims = info(node).type, info(node).dims
    if node.op == "get_attr" or not isinstance(kind, Shard) or dims is None:
        return set()
    whole: Dims = dims  # type: ignore[assignment]
    return set(match_blocks(whole[kind.dim], kind.blocks, kind.units or ranks) or ())
