"""unfuse: fused ops as the conversions and products that they stand for.

A fused op is defined by this: the verifier proves the parts, the simulation runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphpar.errors import InternalError
from graphpar.ops import conversion
from graphpar.program import (
    Info,
    Program,
    Spec,
    annotate,
    copy_graph,
    derive,
    info,
    is_getitem,
    take_place,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard, Type

_ops = torch.ops.graphpar
_linear = torch.ops.aten.linear.default
_add = torch.ops.aten.add.Tensor

FUSED = (
    _ops.gather_linear.default,
    _ops.convert_linear.default,
    _ops.linear_scatter.default,
    _ops.convert_many.default,
)


def is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in FUSED


def unfused(program: Program) -> Program:
    """The program with the parts of each fused op in its place; the same one if it has none.

    The parts have the types and shapes that the fused op and what takes its results say.

    Raises:
        InternalError: a fused op is malformed.
    """
    graphs = {}
    for name, graph in program.graphs():
        if any(is_fused(node) for node in graph.nodes):
            graphs[name], _ = copy_graph(graph)
            for node in [n for n in graphs[name].nodes if is_fused(n)]:
                unfuse(node)
    return program.with_graphs(graphs) if graphs else program


def unfuse(node: fx.Node) -> list[fx.Node]:
    """Put the parts of a fused op in its place; those that communicate come back."""
    with node.graph.inserting_before(node):
        if node.target is _ops.linear_scatter.default:
            return _scatter(node)
        if node.target is _ops.convert_many.default:
            return _many(node)
        return _linears(node)


def gathered_bytes(node: fx.Node) -> int:
    """The bytes of the whole tensor that a fused op gathers for its products; else 0."""
    x = node.args[0] if node.target is _ops.gather_linear.default else None
    return tensor_spec(x).nbytes if isinstance(x, fx.Node) else 0


def keep_gathered(node: fx.Node) -> None:
    """Let autograd keep the whole tensor that a ``gather_linear`` makes."""
    *operands, dim, blocks, group = node.args[:6]
    units = node.args[6] if len(node.args) > 6 else 0
    node.args = (*operands, dim, blocks, group, units, True)


def _linears(node: fx.Node) -> list[fx.Node]:
    x, weights, biases, *layout = _arguments(node)
    source: Type = I if node.target is _ops.convert_linear.default else _shard(layout)
    whole = _converted(node, x, source, R, _group(layout), info(x).spec)
    biases = biases or [None] * len(weights)
    pairs = zip(weights, biases, strict=True)
    parts = [(_linear, (whole, w) if b is None else (whole, w, b)) for w, b in pairs]
    _take_place(node, parts)
    return [whole]


def _scatter(node: fx.Node) -> list[fx.Node]:
    x, weight, bias, *layout = _arguments(node)
    spec, kind = info(node).spec, _shard(layout)
    product = _part(node, _linear, (x, weight), "product", spec, P)
    sum_ = _converted(node, product, P, kind, _group(layout), spec)
    last = sum_
    if bias is not None:
        last = _part(node, _add, (sum_, bias), "bias", spec, kind)
    annotate(last, type=info(node).type)
    take_place(last, node)
    return [sum_]


def _many(node: fx.Node) -> list[fx.Node]:
    xs, group = _arguments(node)
    op, args = conversion(I, R, group)
    return _take_place(node, [(op, (x, *args)) for x in xs])


def _arguments(node: fx.Node) -> list[Any]:
    if node.kwargs:
        raise InternalError(f"{node.name} has keyword arguments")
    return list(node.args)


def _shard(layout: Sequence[Any]) -> Shard:
    dim, blocks, _, *units = layout
    return Shard(dim, tuple(blocks), units[0] if units else 0)


def _group(layout: Sequence[Any]) -> str:
    group: str = next(a for a in layout if isinstance(a, str))
    return group


def _converted(
    node: fx.Node, x: fx.Node, source: Type, target: Type, group: str, spec: Spec
) -> fx.Node:
    op, args = conversion(source, target, group)
    return _part(node, op, (x, *args), "converted", spec, target)


def _part(
    node: fx.Node, op: Any, args: tuple[Any, ...], name: str, spec: Spec, kind: Any
) -> fx.Node:
    return derive(
        node.graph,
        op,
        args,
        like=node,
        origin=info(node).origin,
        name=f"{node.name}_{name}",
        spec=spec,
        type=kind,
        replay=info(node).replay,
        region=info(node).region,
        held=info(node).held,
    )


def _take_place(node: fx.Node, parts: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[fx.Node]:
    """One part for each result of ``node``: what takes a result has its type and shape."""
    spec, kind = info(node).spec, info(node).type
    if not isinstance(spec, tuple) or not isinstance(kind, tuple) or len(spec) != len(parts):
        raise InternalError(f"{node.name} gives {len(parts)} results, not {spec}")
    made: list[fx.Node] = []
    for i, (op, args) in enumerate(parts):
        made.append(_part(node, op, args, str(i), spec[i], kind[i]))
    for user in list(node.users):
        if not is_getitem(user):
            raise InternalError(f"{user.name} takes all results of {node.name} at once")
        part = made[user.args[1]]  # type: ignore[index]
        known: Info = info(user)
        annotate(part, spec=known.spec, type=known.type, source=known.source)
        take_place(part, user)
    node.graph.erase_node(node)
    return made
