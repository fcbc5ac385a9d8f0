"""insert_collectives: put conversions where a value's type is not the one its user needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from graphpar.errors import InternalError
from graphpar.ops import conversion
from graphpar.passes.rules import tensor_arguments
from graphpar.program import (
    MESH_DIM,
    Program,
    copy_graph,
    derive,
    flat_nodes,
    info,
    one_type,
)
from graphpar.types import Type, letter

NAME = "insert-collectives"
_SUFFIX = {"convert": "rep", "all_gather": "full", "reduce_scatter": "part", "all_reduce": "sum"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertCollectives:
    pass


def insert_collectives(
    program: Program, options: InsertCollectives = InsertCollectives()
) -> Program:
    """Convert each value to each type that its users need, once, before the first of them.

    Needs: types and operand types on all nodes. Ensures: the types of every op agree, so
    :func:`graphpar.verify.verify` can re-derive them; the program's form is "typed". Numerics:
    reassociates (sums over ranks).
    """
    graphs = {}
    for name, graph in program.graphs():
        graphs[name], _ = copy_graph(graph)
        _insert(graphs[name])
    state = dict(program.state)
    for name, graph in graphs.items():
        for node in graph.nodes:
            if node.op == "get_attr":
                for canonical in program.state_names(name, node):
                    state[canonical] = replace(state[canonical], type=one_type(node))
    return program.with_graphs(graphs, state=state, form="typed")


def _insert(graph: fx.Graph) -> None:
    converted: dict[tuple[fx.Node, Type], fx.Node] = {}
    for node in list(graph.nodes):
        wanted = info(node).operands
        if wanted is None:
            continue
        given = flat_nodes(node.args) if node.op == "call_module" else _arguments(node)
        if len(given) != len(wanted):
            raise InternalError(f"{node.name} has {len(given)} operands, {len(wanted)} types")
        replacements = iter(
            [
                _converted(graph, node, value, kind, converted)
                for value, kind in zip(given, wanted, strict=True)
            ]
        )

        def replacement(_: fx.Node, new: Iterator[fx.Node] = replacements) -> fx.Node:
            return next(new)

        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), replacement)


def _arguments(node: fx.Node) -> list[fx.Node]:
    if node.op == "output":
        found: list[fx.Node] = []
        fx.node.map_arg(node.args, found.append)
        return found
    return tensor_arguments(node)


def _converted(
    graph: fx.Graph,
    user: fx.Node,
    value: fx.Node,
    kind: Type,
    converted: dict[tuple[fx.Node, Type], fx.Node],
) -> fx.Node:
    source = one_type(value)
    if source == kind:
        return value
    if (value, kind) not in converted:
        op, args = conversion(source, kind, MESH_DIM)
        suffix = _SUFFIX.get(op._schema.name.removeprefix("graphpar::"), letter(kind).lower())
        with graph.inserting_before(user):
            converted[value, kind] = derive(
                graph,
                op,
                (value, *args),
                like=value,
                origin=NAME,
                name=f"{value.name}_{suffix}",
                type=kind,
                axes=None,
                operands=None,
                source=info(value).source if info(value).source.line else info(user).source,
            )
    return converted[value, kind]
