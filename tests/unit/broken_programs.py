"""Changes that each break a program in one way, and what the verifier says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphpar.ops import is_conversion
from graphpar.program import (
    Program,
    annotate,
    copy_program,
    derive,
    info,
    placeholders,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard
from graphpar.verify import Check
from graphpar.verify.shapes import check_local_shapes, check_shapes
from graphpar.verify.structure import (
    check_links,
    check_lint,
    check_ops,
    check_provenance,
    check_regions,
    check_seeds,
)
from graphpar.verify.types import (
    check_local_arguments,
    check_means,
    check_random,
    check_state,
    check_types,
)
from tests.unit import mutations
from tests.unit.broken_structure import (
    a_block_of_other_inputs,
    a_block_without_arguments,
    a_buffer_of_another_shape,
    a_call_in_a_block,
    a_call_in_a_region,
    a_frozen_parameter_that_is_not,
    a_region_in_two_parts,
    a_region_that_keeps_too_little,
    a_region_without_arguments,
    an_input_too_many,
    an_item_of_another_shape,
    an_unknown_buffer,
    another_constant,
    item,
    no_origin,
    no_source,
    no_such_block,
    no_such_state,
    state_of_another_shape,
    too_few_outputs,
    uses_before_definition,
)
from tests.unit.sound_program import (
    CONVERT,
    first,
    nodes,
    of,
    seeded,
)

aten = torch.ops.aten
SEEDED = torch.ops.graphpar.seeded_dropout.default
CALL_SEED = torch.ops.graphpar.call_seed.default


def with_op(target: Any, *rest: Any) -> Callable[[Program], Program]:
    """A call of another op on a Replicate value in place of that value."""

    def change(program: Program) -> Program:
        value = first(program, lambda n: info(n).type == R and is_conversion(n.target))
        with value.graph.inserting_after(value):
            node = derive(value.graph, target, (value, *rest), like=value, origin="test")
        value.replace_all_uses_with(node, lambda n: n is not node)
        return program

    return change


def arguments_out_of_order(program: Program) -> Program:
    node = of(program, aten.layer_norm.default)
    x, shape, weight, bias, *_ = node.args
    node.args, node.kwargs = (x, shape), {"bias": bias, "weight": weight}
    return program


def a_parameter(kind: Any) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        state = program.state["head.weight"]
        return replace(program, state={**program.state, "head.weight": replace(state, type=kind)})

    return change


def a_sharded_buffer(program: Program) -> Program:
    name = "statistics.running_mean"
    state = replace(program.state[name], type=Shard(0, (4,)))
    return replace(program, state={**program.state, name: state})


def a_type(target: Any, kind: Any) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        annotate(of(program, target), type=kind)
        return program

    return change


def a_partial_output(program: Program) -> Program:
    node = of(program, torch.ops.graphpar.all_reduce.default)
    mutations.removed(node)
    return program


def a_replicate_input(program: Program) -> Program:
    node = placeholders(program.graph)[0]
    annotate(node, type=R)
    return program


def a_block_of_other_types(program: Program) -> Program:
    annotate(placeholders(program.blocks["layers"])[0], type=Shard(1, (2, 2)))
    return program


def not_linear(program: Program) -> Program:
    """A function of an addend."""
    node = first(program, lambda n: info(n).type == P)
    with node.graph.inserting_after(node):
        value = derive(node.graph, aten.relu.default, (node,), like=node, origin="test")
    node.replace_all_uses_with(value, lambda n: n is not value)
    return program


def dropout_of_shards(program: Program) -> Program:
    """The same mask on every rank's part."""
    node = of(program, torch.ops.graphpar.dropout.default)
    node.target, node.args = aten.dropout.default, node.args[:3]
    return program


def attention_dropout_of_shards(program: Program) -> Program:
    node = of(program, torch.ops.graphpar.dropout.default)
    x = node.args[0]
    node.target = aten.scaled_dot_product_attention.default
    node.args = (x, x, x, None, 0.5)
    return program


def dropout_of_another_shard(program: Program) -> Program:
    node = of(program, torch.ops.graphpar.dropout.default)
    node.args = (*node.args[:4], (8, 8), "tp")
    return program


def a_mask_taken_twice(_: Program) -> Program:
    program = copy_program(seeded())
    node = [n for n in nodes(program) if n.target is SEEDED][1]
    node.args = (*node.args[:3], 0, *node.args[4:])
    return program


def a_call_number_taken_twice(_: Program) -> Program:
    program = copy_program(seeded())
    node = [n for n in nodes(program) if n.target is CALL_SEED][1]
    node.args = (node.args[0], 1)
    return program


def the_seed_of_the_root(_: Program) -> Program:
    program = copy_program(seeded())
    node = of(program, CALL_SEED)
    node.replace_all_uses_with(node.all_input_nodes[0])
    return program


def a_whole_mask_for_a_shard(_: Program) -> Program:
    program = copy_program(seeded())
    node = of(program, SEEDED)
    node.args = node.args[:4]
    return program


def an_invariant_seed(_: Program) -> Program:
    program = copy_program(seeded())
    annotate(of(program, SEEDED).all_input_nodes[1], type=I)
    return program


def a_seed_of_another_shape(_: Program) -> Program:
    program = copy_program(seeded())
    node = of(program, CALL_SEED)
    annotate(node, spec=replace(tensor_spec(node), shape=(3,)))
    return program


def mean_of_shards(program: Program) -> Program:
    node = first(program, lambda n: n.target is aten.sum.dim_IntList)
    node.target = aten.mean.dim
    return program


def mean_without_count(program: Program) -> Program:
    node = of(program, aten.sum.dim_IntList)
    divided = next(iter(node.users))
    divided.replace_all_uses_with(node)
    divided.graph.erase_node(divided)
    return program


def mean_by_local_count(program: Program) -> Program:
    divided = next(iter(of(program, aten.sum.dim_IntList).users))
    divided.args = (divided.args[0], 256)
    return program


def whole_sizes(program: Program) -> Program:
    node = first(program, lambda n: info(n).whole_call)
    node.args = info(node).whole_call[0]  # type: ignore[index]
    return program


def other_operands(program: Program) -> Program:
    """The call that is checked is not the call that runs."""
    node = first(program, lambda n: info(n).whole_call)
    other = next(n for n in node.graph.nodes if n.op == "placeholder")
    annotate(node, whole_call=((other, *node.args[1:]), dict(node.kwargs)))
    return program


def another_shape(program: Program) -> Program:
    node = of(program, aten.relu.default)
    annotate(node, spec=replace(tensor_spec(node), dtype=torch.float64))
    return program


def a_gradient_denied(program: Program) -> Program:
    node = of(program, aten.relu.default)
    annotate(node, spec=replace(tensor_spec(node), differentiable=False))
    return program


def a_conversion_of_another_shape(program: Program) -> Program:
    node = of(program, torch.ops.graphpar.all_gather.default)
    annotate(node, spec=replace(tensor_spec(node), dtype=torch.float64))
    return program


def impossible_shapes(program: Program) -> Program:
    node = of(program, aten.linear.default)
    node.args = (node.args[0], node.args[0])
    return program


Break = Callable[[Program], Program]

# Check, what breaks a program of the local (or typed) form, what the error says.
BROKEN: list[tuple[Check, Break, str]] = [
    (check_lint, uses_before_definition, "malformed"),
    (check_lint, too_few_outputs, "does not give 2 outputs"),
    (check_lint, an_unknown_buffer, "nothing is no buffer"),
    (check_lint, a_buffer_of_another_shape, "does not fit buffer"),
    (check_lint, an_input_too_many, "does not take 2 inputs"),
    (check_provenance, no_source, "has no source line"),
    (check_provenance, no_origin, "has no source line"),
    (check_links, state_of_another_shape, "not the tensor of head.bias"),
    (check_links, a_frozen_parameter_that_is_not, "not the tensor of head.bias"),
    (check_links, no_such_state, "head.nothing"),
    (check_links, another_constant, "does not describe the constant"),
    (check_links, no_such_block, "names no block"),
    (check_links, a_block_of_other_inputs, "layers.0 takes x"),
    (check_links, a_block_without_arguments, "layers.0 takes x"),
    (check_links, a_call_in_a_block, "names no block"),
    (check_links, item(2), "is not item 2"),
    (check_links, item(-1), "is not item -1"),
    (check_links, an_item_of_another_shape, "is not item 0"),
    (check_regions, a_region_without_arguments, "region 0 is not given"),
    (check_regions, a_region_that_keeps_too_little, "relu runs again, but .* is not kept"),
    (check_regions, a_region_in_two_parts, "is apart from its region 0"),
    (check_regions, a_call_in_a_region, "cannot be in a region"),
    (check_ops, with_op(torch.relu), "is no op"),
    (check_ops, with_op(aten.relu_.default), "writes to its operands"),
    (
        check_ops,
        with_op(torch.ops._c10d_functional.all_reduce.default, "sum", "tp"),
        "may not stand in a program of form 'local'",
    ),
    (
        check_ops,
        with_op(torch.ops.graphpar.dropout_mask.default, 0.5, 0, (8,), "tp"),
        "may not stand in a program of form 'local'",
    ),
    (check_ops, arguments_out_of_order, "out of order"),
    (check_state, a_parameter(R), r"parameter head.weight .* cannot be Replicate"),
    (check_state, a_parameter(P), r"parameter head.weight .* cannot be Partial"),
    (check_state, a_parameter(Shard(0, (4, 8))), r"cannot be Shard"),
    (check_state, a_parameter(Shard(0, (16,), 5)), r"cannot be Shard"),
    (check_state, a_parameter(Shard(2, (8,))), r"cannot be Shard"),
    (check_state, a_sharded_buffer, r"buffer .* cannot be Shard"),
    (check_types, a_parameter(I), r"head.weight is Invariant, not Shard"),
    (check_types, a_type(aten.relu.default, I), "relu is Shard.*, not Invariant"),
    (check_types, a_type(CONVERT, I), "is Replicate, not Invariant"),
    (check_types, a_partial_output, "output mean is Partial, not Invariant"),
    (check_types, a_replicate_input, "input x is Replicate, not Invariant"),
    (check_types, a_block_of_other_types, "Shard"),
    (check_types, not_linear, "is not linear in Partial operands"),
    (check_types, dropout_of_another_shard, "its dropout wants"),
    (check_types, a_whole_mask_for_a_shard, "its dropout is not of that"),
    (check_types, an_invariant_seed, "every rank needs the same seed"),
    (check_seeds, a_mask_taken_twice, "would drop what another one drops"),
    (check_seeds, a_call_number_taken_twice, "would drop what another one drops"),
    (check_seeds, the_seed_of_the_root, "would drop what another one drops"),
    (check_shapes, a_seed_of_another_shape, "is no seed"),
    (check_random, dropout_of_shards, "would draw other numbers"),
    (check_random, attention_dropout_of_shards, "would draw other numbers"),
    (check_means, mean_of_shards, "is not the mean of the whole"),
    (check_means, mean_without_count, "is not divided by 512"),
    (check_means, mean_by_local_count, "is not divided by 512"),
    (check_local_arguments, whole_sizes, "not those of one rank"),
    (check_local_arguments, other_operands, "have other operands"),
    (check_shapes, another_shape, r"relu is torch.float32.*, not torch.float64"),
    (check_shapes, a_gradient_denied, "has a gradient"),
    (check_shapes, a_conversion_of_another_shape, "keeps the whole tensor's shape"),
    (check_shapes, impossible_shapes, "linear"),
    (check_local_shapes, whole_sizes, "invalid for input of size"),
]
