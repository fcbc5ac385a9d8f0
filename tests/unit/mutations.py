"""Copies of a program that are changed in one place, for the verifier to refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.ops import conversion, is_conversion, signature
from graphpar.passes.rules import tensor_arguments
from graphpar.program import (
    MESH_DIM,
    Program,
    TensorSpec,
    annotate,
    copy_graph,
    derive,
    info,
    tensor_spec,
)
from graphpar.types import CONVERSIONS, I, P, R, Shard, Type, fits, units_for

aten = torch.ops.aten
Place = tuple[str, str]
"""A block, or "" for the root, and the name of a node in it."""


@dataclass(frozen=True)
class Mutant:
    kind: str
    what: str
    program: Program


def find(program: Program, place: Place) -> fx.Node:
    block, name = place
    graph = program.blocks[block] if block else program.graph
    found: fx.Node = next(n for n in graph.nodes if n.name == name)
    return found


def places(program: Program, wanted: Callable[[fx.Node], object]) -> list[Place]:
    return [(block, n.name) for block, graph in program.graphs() for n in graph.nodes if wanted(n)]


def conversions(program: Program) -> list[Place]:
    return places(program, lambda n: is_conversion(n.target))


def copied(program: Program, *blocks: str) -> Program:
    """The program with copies of some of its graphs."""
    graphs = dict(program.graphs())
    return program.with_graphs({name: copy_graph(graphs[name])[0] for name in blocks})


def changed(program: Program, place: Place, change: Callable[[fx.Node], object]) -> Program:
    """The program with one node changed."""
    program = copied(program, place[0])
    node = find(program, place)
    graph = node.graph
    change(node)
    for user in graph.nodes:
        follow(user)
    return program


def follow(node: fx.Node) -> None:
    """Let the node's call on whole tensors have the operands that its own call has now."""
    whole = info(node).whole_call
    if whole is None:
        return
    mine: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), mine.append)
    operands = iter(mine)
    annotate(node, whole_call=fx.node.map_arg(whole, lambda _: next(operands)))


def types_of(node: fx.Node) -> tuple[Any, Any]:
    """The types that a conversion node goes between."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return signature(node.target, node.args[1:])


# --- one conversion changed ---------------------------------------------------------------------


def removed(node: fx.Node) -> None:
    """Users read the conversion's input."""
    value = node.args[0]
    assert isinstance(value, fx.Node)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def doubled(node: fx.Node) -> None:
    """Users read the conversion of the conversion."""
    with node.graph.inserting_after(node):
        again = derive(node.graph, node.target, node.args, like=node, origin="mutant")
    node.replace_all_uses_with(again)
    again.args = (node, *node.args[1:])


def become(node: fx.Node, source: Type, target: Type) -> None:
    """The conversion goes between other types, and says so."""
    node.target, args = conversion(source, target, MESH_DIM)
    node.args = (node.args[0], *args)
    annotate(node, type=target)


def mistyped(program: Program, place: Place, source: Type, target: Type) -> Mutant:
    def change(node: fx.Node) -> None:
        become(node, source, target)

    what = f"{place} {source} → {target}"
    return Mutant("mistyped", what, changed(program, place, change))


def moved_down(node: fx.Node) -> None:
    """The conversion's one user runs before it."""
    (user,) = node.users
    value = node.args[0]
    assert isinstance(value, fx.Node)
    user.replace_input_with(node, value)
    user.append(node)
    user.replace_all_uses_with(node, lambda n: n is not node)
    node.args = (user, *node.args[1:])
    annotate(node, spec=tensor_spec(user))


def can_move_down(node: fx.Node) -> bool:
    users = list(node.users)
    return is_conversion(node.target) and len(users) == 1 and _is_plain(users[0])


def moved_up(node: fx.Node) -> None:
    """The op that makes the conversion's input runs after it, on its first operand converted."""
    made = node.args[0]
    assert isinstance(made, fx.Node)
    operand = tensor_arguments(made)[0]
    node.replace_all_uses_with(made)
    node.args = (operand, *node.args[1:])
    annotate(node, spec=tensor_spec(operand))
    made.replace_input_with(operand, node)
    made.prepend(node)


def can_move_up(node: fx.Node) -> bool:
    made = node.args[0] if is_conversion(node.target) else None
    return (
        isinstance(made, fx.Node)
        and _is_plain(made)
        and len(made.users) == 1
        and len(tensor_arguments(made)) > 0
    )


def _is_plain(node: fx.Node) -> bool:
    op = isinstance(node.target, torch._ops.OpOverload) and not is_conversion(node.target)
    return op and isinstance(info(node).spec, TensorSpec)


def shards(shape: tuple[int, ...], ranks: int, *like: Any) -> list[Shard]:
    """Ways to cut a tensor: each dimension in one block, and those of ``like`` in two."""
    known = [kind for kind in like if isinstance(kind, Shard)]
    sizes = list(enumerate(shape))
    found = [*known, *(Shard(dim, (size,), units_for(size, ranks)) for dim, size in sizes)]
    found += [Shard(dim, (size,), ranks + 1) for dim, size in sizes]
    for kind in known or [Shard(dim, ()) for dim in range(len(shape))]:
        half = shape[kind.dim] // 2
        found.append(Shard(kind.dim, (half, shape[kind.dim] - half)))
    return [s for s in dict.fromkeys(found) if fits(s, shape, ranks)]


def pairs(node: fx.Node, ranks: int) -> Iterator[tuple[Type, Type]]:
    """All pairs of types that the table of conversions knows for this tensor."""
    cuts = shards(tensor_spec(node).shape, ranks, *types_of(node))
    every: dict[str, list[Any]] = {"I": [I], "R": [R], "P": [P], "S": list(cuts)}
    for source, target in CONVERSIONS:
        for a in every[source]:
            yield from ((a, b) for b in every[target] if a != b)
