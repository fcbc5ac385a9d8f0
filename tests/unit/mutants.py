"""All mutants of a program: each conversion, type, argument and bias changed in every way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphpar.errors import VerifyError
from graphpar.ops import is_conversion
from graphpar.passes.rules import is_form, local_call, whole_op
from graphpar.program import (
    MESH_DIM,
    PerRank,
    Program,
    TensorSpec,
    annotate,
    copy_program,
    info,
    is_getitem,
    outputs,
    placeholders,
    result_types,
    tensor_spec,
)
from graphpar.types import I, P, R, Type, layout_arguments, letter, split_layout
from graphpar.verify.derive import derive_type
from graphpar.verify.node import operand_types
from graphpar.verify.types import check_state
from tests.unit.mutations import (
    Mutant,
    Place,
    can_move_down,
    can_move_up,
    changed,
    conversions,
    copied,
    doubled,
    find,
    mistyped,
    moved_down,
    moved_up,
    pairs,
    places,
    removed,
    shards,
    types_of,
)

aten = torch.ops.aten


def mutants_of_conversions(program: Program) -> Iterator[Mutant]:
    """Each conversion removed, doubled, moved, of other types, of another group, said to give
    another type, exchanged with the first of each other kind.

    Then again with the types behind it re-derived, so that nothing is refused only because the
    declared types are stale.
    """
    found = conversions(program)
    for place in found:
        node = find(program, place)
        own = types_of(node)
        edits = {"removed": removed, "doubled": doubled}
        if can_move_down(node):
            edits["moved down"] = moved_down
        if can_move_up(node):
            edits["moved up"] = moved_up
        for kind, edit in edits.items():
            mutant = Mutant(kind, str(place), changed(program, place, edit))
            yield mutant
            yield rederived(mutant, program)
        for source, target in pairs(node, program.ranks):
            if (source, target) != own:
                mutant = mistyped(program, place, source, target)
                yield mutant
                if letter(source) == letter(own[0]):
                    yield rederived(mutant, program)
        yield from (of_group(program, place, group) for group in ("dp", ""))
        for lie in other_types(tensor_spec(node), info(node).type, program.ranks):
            yield Mutant("declared", f"{place} {lie}", declared(program, place, lie))
    firsts: dict[Any, Place] = {}
    for place in found:
        firsts.setdefault(kind_of(program, place), place)
    swaps = {frozenset((a, b)) for a in found for b in firsts.values()}
    for one, other in sorted(map(sorted, (pair for pair in swaps if len(pair) == 2))):
        if kind_of(program, one) != kind_of(program, other):
            mutant = Mutant("exchanged", f"{one} and {other}", exchanged(program, one, other))
            yield mutant
            yield rederived(mutant, program)


def kind_of(program: Program, place: Place) -> tuple[str, str]:
    source, target = types_of(find(program, place))
    return letter(source), letter(target)


def of_group(program: Program, place: Place, group: str) -> Mutant:
    def change(node: fx.Node) -> None:
        node.args = (*node.args[:-1], group)

    return Mutant("other group", f"{place} {group!r}", changed(program, place, change))


def declared(program: Program, place: Place, kind: Type) -> Program:
    return changed(program, place, lambda node: annotate(node, type=kind))


def other_types(spec: TensorSpec, known: Any, ranks: int) -> list[Type]:
    kinds: list[Type] = [I, R, P, *shards(spec.shape, ranks)]
    return [kind for kind in kinds if kind != known]


def exchanged(program: Program, one: Place, other: Place) -> Program:
    program = copied(program, one[0], other[0])
    a, b = find(program, one), find(program, other)
    a.target, b.target = b.target, a.target
    a.args, b.args = (a.args[0], *b.args[1:]), (b.args[0], *a.args[1:])
    for node in (a, b):
        annotate(node, type=types_of(node)[1])
    return program


def allowed(program: Program) -> bool:
    """Whether state may have such types at all."""
    try:
        check_state(program)
    except VerifyError:
        return False
    return True


def mutants_of_state(program: Program) -> Iterator[Mutant]:
    """Each parameter, buffer and constant of another type, alone and with all that reads it."""
    for name, state in program.state.items():
        for kind in other_types(state.spec, state.type, program.ranks):
            copy = replace(program, state={**program.state, name: replace(state, type=kind)})
            yield Mutant("state", f"{name} {kind}", copy)
            if not allowed(copy):
                continue
            copy = copy_program(copy)
            for block, graph in copy.graphs():
                for node in graph.nodes:
                    if node.op == "get_attr" and name in copy.state_names(block, node):
                        annotate(node, type=kind)
            yield rederived(Mutant("state", f"{name} {kind} where read", copy), program)


def mutants_of_inputs(program: Program) -> Iterator[Mutant]:
    for place in places(program, lambda n: n.op == "placeholder"):
        node = find(program, place)
        for kind in other_types(tensor_spec(node), info(node).type, program.ranks):
            mutant = Mutant("input", f"{place} {kind}", declared(program, place, kind))
            yield mutant
            if not place[0]:  # a block's inputs have the types of what is given to it
                yield rederived(mutant, program)


def mutants_of_arguments(program: Program) -> Iterator[Mutant]:
    """Each local size argument as it was for the whole tensor, and each size one off, on all
    ranks or on one."""
    for place in places(program, lambda n: info(n).whole_call is not None):
        node = find(program, place)
        whole = changed(program, place, _as_whole)
        yield Mutant("size", f"{place} of the whole", whole)
        for index, argument in enumerate(node.args):
            if isinstance(argument, (list, tuple)) and isinstance(argument[0], (int, PerRank)):
                for at, size in enumerate(argument):
                    for other in _other_sizes(size):
                        sizes = [*argument[:at], other, *argument[at + 1 :]]
                        yield _with_argument(program, place, index, sizes)
            elif isinstance(argument, (int, PerRank)) and not isinstance(argument, bool):
                for other in _other_sizes(argument):
                    yield _with_argument(program, place, index, other)


def _other_sizes(size: Any) -> Iterator[Any]:
    if not isinstance(size, PerRank):
        yield from (size - 1, size + 1)
        return
    first, *rest = size.values
    yield PerRank((first + 1, *rest))
    yield PerRank((first, *(value - 1 for value in rest)))
    yield PerRank(size.values[::-1])
    yield first


def _as_whole(node: fx.Node) -> None:
    call = info(node).whole_call
    assert call is not None
    node.args, node.kwargs = call


def _with_argument(program: Program, place: Place, index: int, value: Any) -> Mutant:
    def change(node: fx.Node) -> None:
        node.args = (*node.args[:index], value, *node.args[index + 1 :])

    return Mutant("size", f"{place} argument {index} is {value}", changed(program, place, change))


def mutants_of_forms(program: Program) -> Iterator[Mutant]:
    """Each op that reduces over a sharded axis: without its reductions, of another group, of
    another layout, said to give another type; and the others made of it, with equal arguments."""

    def edits(node: fx.Node) -> Iterator[tuple[str, tuple[Any, ...]]]:
        call: Any = node.args
        args, kind, _ = split_layout(call)
        halves = tuple(size // 2 for size in kind.blocks for _ in range(2))
        for name, other in (
            ("other blocks", replace(kind, blocks=halves)),
            ("other axis", replace(kind, dim=kind.dim - 1)),
            ("other units", replace(kind, units=kind.units + 1)),
        ):
            yield name, (*args, *layout_arguments(other, MESH_DIM))
        yield "other group", (*args, *layout_arguments(kind, "dp"))

    for place in places(program, lambda n: is_form(n.target)):
        node = find(program, place)
        whole = whole_op(node.target)

        def without(node: fx.Node, whole: Any = whole) -> None:
            node.target = whole
            _as_whole(node)

        mutant = Mutant("no reduction", str(place), changed(program, place, without))
        yield mutant
        yield Mutant("no reduction, Partial", str(place), declared(mutant.program, place, P))
        for kind, args in edits(node):

            def edit(node: fx.Node, args: tuple[Any, ...] = args) -> None:
                node.args = args

            yield Mutant(kind, str(place), changed(program, place, edit))
        for lie in other_types(tensor_spec(node), info(node).type, program.ranks):
            yield Mutant("declared", f"{place} {lie}", declared(program, place, lie))


def mutants_of_biases(program: Program) -> Iterator[Mutant]:
    """Each bias of a row-parallel product added before the reduction, on every rank."""

    def is_bias(node: fx.Node) -> bool:
        first = node.args[0] if node.target is aten.add.Tensor else None
        return (
            isinstance(first, fx.Node) and is_conversion(first.target) and (types_of(first)[0] == P)
        )

    for place in places(program, is_bias):

        def early(node: fx.Node) -> None:
            reduction = node.args[0]
            assert isinstance(reduction, fx.Node)
            product = reduction.args[0]
            assert isinstance(product, fx.Node)
            node.args = (product, *node.args[1:])
            node.append(reduction)
            node.replace_all_uses_with(reduction, lambda n: n is not reduction)
            reduction.args = (node, *reduction.args[1:])
            annotate(node, type=P)

        mutant = Mutant("early bias", str(place), changed(program, place, early))
        yield mutant
        yield rederived(mutant, program)


# --- types behind a change ----------------------------------------------------------------------


def rederived(mutant: Mutant, original: Program) -> Mutant:
    """The mutant with the types behind the change derived anew, as far as they can be, and local
    arguments that fit them: a lie told consistently."""
    program = copy_program(mutant.program)
    known = {_row(node) for _, graph in original.graphs() for node in graph.nodes}
    fresh = {n for _, graph in program.graphs() for n in graph.nodes if _row(n) not in known}
    _rederive(program, "", program.graph, fresh)
    return Mutant(f"{mutant.kind}, re-derived", mutant.what, program)


def _row(node: fx.Node) -> tuple[Any, ...]:
    return node.name, node.target, str(node.args), info(node).type


def _rederive(program: Program, block: str, graph: fx.Graph, fresh: set[fx.Node]) -> None:
    """Derive the nodes that are fresh or behind those whose types change."""
    for node in graph.nodes:
        before = info(node).type
        if node.op == "call_module":
            name = program.calls[str(node.target)]
            body = program.blocks[name]
            for entry, value in zip(placeholders(body), node.all_input_nodes, strict=True):
                if info(entry).type != info(value).type:
                    annotate(entry, type=info(value).type)
                    fresh.add(entry)
            _rederive(program, name, body, fresh)
            kinds = tuple(info(value).type for value in outputs(body))
            annotate(node, type=kinds)
        elif node.op == "call_function" and not fresh.isdisjoint([node, *node.all_input_nodes]):
            with suppress(Exception):  # it has no type there: the verifier says so
                annotate(node, type=derive_type(program, block, node))
                _localize(program, node)
        if info(node).type != before:
            fresh.add(node)


def _localize(program: Program, node: fx.Node) -> None:
    if is_getitem(node) or is_conversion(node.target):
        return
    if info(node).whole_call is None:
        annotate(node, whole_call=(node.args, node.kwargs))
    operands, results = operand_types(node), result_types(node)
    call = local_call(node, operands, results, program.ranks)
    node.target, node.args, node.kwargs = call
