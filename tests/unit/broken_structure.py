"""Changes that each break a program's structure, links or provenance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from graphpar.program import (
    Program,
    Region,
    annotate,
    is_getitem,
    output_node,
    outputs,
    placeholders,
    tensor_spec,
)
from graphpar.provenance import UNKNOWN
from tests.unit.sound_program import (
    first,
    of,
)

aten = torch.ops.aten
SEEDED = torch.ops.graphpar.seeded_dropout.default
CALL_SEED = torch.ops.graphpar.call_seed.default
Change = Callable[[Program], Program]


def uses_before_definition(program: Program) -> Program:
    node = of(program, aten.relu.default)
    node.prepend(next(iter(node.users)))
    return program


def too_few_outputs(program: Program) -> Program:
    end = output_node(program.graph)
    end.args = (outputs(program.graph)[:-1],)
    return program


def an_unknown_buffer(program: Program) -> Program:
    return replace(program, mutations=("nothing", *program.mutations[1:]))


def a_buffer_of_another_shape(program: Program) -> Program:
    end = output_node(program.graph)
    values = outputs(program.graph)
    end.args = ([*values[:-2], values[0], values[-1]],)
    return program


def an_input_too_many(program: Program) -> Program:
    return replace(program, placeholders=(0, 1))


def no_source(program: Program) -> Program:
    annotate(of(program, aten.relu.default), source=UNKNOWN)
    return program


def no_origin(program: Program) -> Program:
    annotate(of(program, aten.relu.default), origin="")
    return program


def state_of_another_shape(program: Program) -> Program:
    state = program.state["head.bias"]
    spec = replace(state.spec, shape=(32,))
    return replace(program, state={**program.state, "head.bias": replace(state, spec=spec)})


def a_frozen_parameter_that_is_not(program: Program) -> Program:
    state = program.state["head.bias"]
    spec = replace(state.spec, differentiable=False)
    return replace(program, state={**program.state, "head.bias": replace(state, spec=spec)})


def no_such_state(program: Program) -> Program:
    first(program, lambda n: n.target == "head.bias").target = "head.nothing"
    return program


def another_constant(program: Program) -> Program:
    name = next(iter(program.constants))
    return replace(program, constants={name: program.constants[name][:4]})


def no_such_block(program: Program) -> Program:
    return replace(program, calls=dict.fromkeys(program.calls, "nothing"))


def a_block_of_other_inputs(program: Program) -> Program:
    (entry, *_) = placeholders(program.blocks["layers"])
    spec = tensor_spec(entry)
    annotate(entry, spec=replace(spec, shape=(2, 8, 8)))
    return program


def a_block_without_arguments(program: Program) -> Program:
    first(program, lambda n: n.op == "call_module").args = ()
    return program


def a_call_in_a_block(program: Program) -> Program:
    call = first(program, lambda n: n.op == "call_module")
    graph = program.blocks["layers"]
    with graph.inserting_before(output_node(graph)):
        inner = graph.create_node("call_module", call.target, (placeholders(graph)[0],))
    inner.meta = dict(call.meta)
    return program


def is_part(node: fx.Node) -> bool:
    return is_getitem(node) and node.all_input_nodes[0].target is aten.split.Tensor


def item(index: int) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        node = first(program, is_part)
        node.args = (node.args[0], index)
        return program

    return change


def an_item_of_another_shape(program: Program) -> Program:
    node = first(program, is_part)
    annotate(node, spec=replace(tensor_spec(node), shape=(2, 4, 2, 8)))
    return program


def a_region(*kept: str, passed: tuple[str, ...] = (), later: bool = False) -> Change:
    """Backward runs relu again, for the product after it; or, apart from it, for the last node."""

    def change(program: Program) -> Program:
        relu = of(program, aten.relu.default)
        (product,) = relu.users
        region = Region(number=0, kept=kept, passed=passed)
        annotate(relu, region=region, replay=True)
        end = output_node(relu.graph).all_input_nodes[0] if later else product
        names = tuple(n.name for n in end.all_input_nodes) if later else ()
        annotate(relu, region=replace(region, kept=(*kept, *names)))
        annotate(end, region=replace(region, kept=(*kept, *names)))
        return program

    return change


def input_of_relu(program: Program) -> str:
    return of(program, aten.relu.default).all_input_nodes[0].name


def a_region_without_arguments(program: Program) -> Program:
    return a_region()(program)


def a_region_that_keeps_too_little(program: Program) -> Program:
    return a_region(passed=(input_of_relu(program),))(program)


def a_region_in_two_parts(program: Program) -> Program:
    return a_region(input_of_relu(program), later=True)(program)


def a_call_in_a_region(program: Program) -> Program:
    call = first(program, lambda n: n.op == "call_module")
    annotate(call, region=Region(number=0, kept=()))
    return program
