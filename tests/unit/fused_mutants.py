"""Fused ops changed in every way: of another layout or group, of another kind, taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphpar.program import MESH_DIM, Program, annotate, derive, info, tensor_spec
from graphpar.types import P, Shard, Type, layout_arguments, split_layout
from graphpar.unfuse import is_fused
from tests.unit.mutants import other_types
from tests.unit.mutations import Mutant, Place, changed, find, places

_ops = torch.ops.graphpar
_linear = torch.ops.aten.linear.default


def mutants_of_fused_ops(program: Program) -> Iterator[Mutant]:
    for place in places(program, is_fused):
        node = find(program, place)
        for kind, edit in _edits(node):
            yield Mutant(kind, str(place), changed(program, place, edit))
        for user in list(node.users) if isinstance(info(node).type, tuple) else [node]:
            for lie in other_types(tensor_spec(user), info(user).type, program.ranks):
                yield from _lies(program, place, user, lie)


Edit = Callable[[fx.Node], None]


def _edits(node: fx.Node) -> Iterator[tuple[str, Edit]]:
    yield "other group", lambda n: _with(n, _arguments(n, lambda a: "dp" if a == MESH_DIM else a))
    yield "malformed", lambda n: _with(n, n.args[:-1])
    if node.target is _ops.convert_many.default:
        yield "one less", lambda n: _with(n, (n.args[0][:-1], *n.args[1:]))  # type: ignore[index]
        yield "removed", _without_conversion
        return
    yield "removed", _without_conversion
    if node.target is _ops.convert_linear.default:
        shape = tensor_spec(node.args[0]).shape  # type: ignore[arg-type]
        layout = layout_arguments(Shard(0, (shape[0],)), MESH_DIM)
        yield "other kind", lambda n: _become(n, _ops.gather_linear.default, layout)
        return
    call: Any = node.args
    kind = split_layout(call[3:])[1]
    halves = tuple(size // 2 for size in kind.blocks for _ in range(2))
    for name, other in (
        ("other blocks", replace(kind, blocks=halves)),
        ("other axis", replace(kind, dim=kind.dim - 1)),
        ("other units", replace(kind, units=kind.units + 1)),
    ):
        yield name, _of_layout(other)
    if node.target is _ops.gather_linear.default:
        yield "other kind", lambda n: _become(n, _ops.convert_linear.default, (MESH_DIM,))
    elif call[2] is not None:
        yield "early bias", _early_bias


def _of_layout(kind: Shard) -> Edit:
    return lambda n: _with(n, (*n.args[:3], *layout_arguments(kind, MESH_DIM)))


def _arguments(node: fx.Node, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(change(a) if isinstance(a, str) else a for a in node.args)


def _with(node: fx.Node, args: tuple[Any, ...]) -> None:
    node.args = args


def _become(node: fx.Node, target: Any, layout: tuple[Any, ...]) -> None:
    node.target, node.args = target, (*node.args[:3], *layout)


def _without_conversion(node: fx.Node) -> None:
    """The products of the operand as it is; parameters as they are."""
    args: Any = node.args
    with node.graph.inserting_before(node):
        if node.target is _ops.linear_scatter.default:
            product = derive(node.graph, _linear, args[:2], like=node, origin="mutant")
            node.replace_all_uses_with(product)
            return
    for user in list(node.users):
        index: Any = user.args[1]
        if node.target is _ops.convert_many.default:
            user.replace_all_uses_with(args[0][index])
            continue
        bias = [args[2][index]] if args[2] and args[2][index] is not None else []
        with node.graph.inserting_before(user):
            operands = (args[0], args[1][index], *bias)
            product = derive(node.graph, _linear, operands, like=user, origin="mutant")
        user.replace_all_uses_with(product)


def _early_bias(node: fx.Node) -> None:
    """The bias within the product, before the sum."""
    args: Any = node.args
    x, weight, bias, *layout = args
    with node.graph.inserting_before(node):
        changes: dict[str, Any] = {"like": node, "origin": "mutant", "type": P}
        product = derive(node.graph, _linear, (x, weight, bias), **changes)
        reduced = derive(
            node.graph,
            _ops.reduce_scatter.default,
            (product, *layout),
            like=node,
            origin="mutant",
        )
    node.replace_all_uses_with(reduced)


def _lies(program: Program, place: Place, user: fx.Node, lie: Type) -> Iterator[Mutant]:
    """Another type on a result: on the item alone, on the op alone, on both."""
    node = find(program, place)
    what = f"{place} {user.name} {lie}"

    def of_item(n: fx.Node) -> None:
        item = next(u for u in n.graph.nodes if u.name == user.name)
        annotate(item, type=lie)

    def of_op(n: fx.Node) -> None:
        known: Any = info(n).type
        index: Any = user.args[1]
        annotate(n, type=(*known[:index], lie, *known[index + 1 :]))

    yield Mutant("declared", what, changed(program, place, of_item))
    if user is not node:
        yield Mutant("declared of op", what, changed(program, place, of_op))

        def of_both(n: fx.Node) -> None:
            of_item(n)
            of_op(n)

        yield Mutant("declared of both", what, changed(program, place, of_both))
