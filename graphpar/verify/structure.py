"""The structure of a program: well-formed graphs whose nodes fit what they refer to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphpar.errors import VerifyError
from graphpar.ops import is_conversion
from graphpar.passes.rules import is_form
from graphpar.program import (
    Form,
    Info,
    Program,
    TensorSpec,
    info,
    is_getitem,
    output_node,
    outputs,
    placeholders,
    spec_of,
    tensor_spec,
)
from graphpar.unfuse import is_fused
from graphpar.verify.node import SEEDED, SEEDS, failure, per_node


def check_lint(program: Program) -> None:
    """The graphs are well-formed; the root has the inputs and outputs that the program names."""
    for name, graph in program.graphs():
        try:
            graph.lint()
        except RuntimeError as error:
            raise VerifyError(f"graph {name or 'forward'} is malformed: {error}") from error
    end, values = output_node(program.graph), outputs(program.graph)
    if len(placeholders(program.graph)) != len(program.placeholders):
        raise failure(end, f"the root does not take {len(program.placeholders)} inputs")
    count = program.out_spec.num_leaves
    if len(values) != count + len(program.mutations):
        raise failure(end, f"the root does not give {count} outputs and the mutated buffers")
    for name, value in zip(program.mutations, values[count:], strict=True):
        state = program.state.get(name)
        if state is None or state.kind != "buffer" or not isinstance(value, fx.Node):
            raise failure(end, f"{name} is no buffer that the root can write to")
        if not _same(tensor_spec(value), state.spec):
            raise failure(value, f"{value.name} does not fit buffer {name}")


def _same(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two specs are equal but for ``differentiable``."""
    return replace(a, differentiable=b.differentiable) == b


@per_node
def check_provenance(program: Program, block: str, node: fx.Node) -> None:
    """Every op knows the user's line and the pass that made it."""
    if node.op == "call_function" and not (info(node).source.line and info(node).origin):
        raise failure(node, f"{node.name} has no source line")


@per_node
def check_links(program: Program, block: str, node: fx.Node) -> None:
    """State, blocks and items of tuples are what the nodes that read them take them for."""
    spec = info(node).spec
    if node.op == "get_attr":
        for name in program.state_names(block, node):
            if name not in program.state or program.state[name].spec != spec:
                raise failure(node, f"{node.name} is not the tensor of {name}")
            if name in program.constants and spec != _constant_spec(program.constants[name], spec):
                raise failure(node, f"{node.name} does not describe the constant {name}")
    elif node.op == "call_module":
        graph = program.blocks.get(program.calls.get(str(node.target), ""))
        if graph is None or block:
            raise failure(node, f"{node.target} names no block")
        entries, exits = placeholders(graph), outputs(graph)
        if node.kwargs or [*map(_spec, node.args)] != [*map(_spec, entries)]:
            raise failure(node, f"{node.target} takes {', '.join(n.name for n in entries)}")
        if spec != tuple(map(_spec, exits)):
            raise failure(node, f"{node.target} gives other values")
    elif is_getitem(node):
        source, index = node.args
        if (index, spec) not in [*enumerate(_spec(source))]:
            raise failure(node, f"{node.name} is not item {index} of {source}")


@per_node
def check_items(program: Program, block: str, node: fx.Node) -> None:
    """Items of fused ops have the types that these give."""
    if is_getitem(node) and is_fused(node.args[0]):  # type: ignore[arg-type]
        source, index = node.args
        if info(source).type[index] != info(node).type:  # type: ignore[arg-type, index]
            raise failure(node, f"{node.name} is {info(node).type}, not item {index} of {source}")


def _constant_spec(value: torch.Tensor, spec: TensorSpec) -> TensorSpec:
    """What ``value`` is; a model on the meta device has constants with values all the same."""
    found = spec_of(value)
    return replace(found, device=spec.device) if spec.device.type == "meta" else found


def _spec(value: Any) -> Any:
    return info(value).spec


_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


def _has_place(node: fx.Node, form: Form) -> bool:
    """Whether an op of graphpar's own may stand in a program of that form."""
    if is_conversion(node.target):
        return form != "whole"
    if is_fused(node):
        return form == "local"
    if node.target in SEEDS:
        return form != "typed"
    if node.target in SEEDED:
        return form == "local" or (form == "whole" and len(node.args) == 4)
    return (node.target is torch.ops.graphpar.dropout.default or is_form(node.target)) and (
        form == "local"
    )


def check_seeds(program: Program) -> None:
    """No two dropouts take the same mask: ops of a graph differ in their numbers, calls of blocks
    in their seeds."""
    for _, graph in program.graphs():
        seen = set[Any]()
        for node in graph.nodes:
            keys: list[Any] = []
            if node.target in SEEDED:
                keys = [(node.args[1], node.args[3])]
            elif node.target is torch.ops.graphpar.call_seed.default:
                keys = [("call", node.args[1])]
            elif node.op == "call_module":
                keys = [a for a in node.args if a.target in SEEDS]
            if any(key in seen or getattr(key, "target", None) is SEEDS[0] for key in keys):
                raise failure(node, f"{node.name} would drop what another one drops")
            seen.update(keys)


@per_node
def check_ops(program: Program, block: str, node: fx.Node) -> None:
    """Ops have no side effects, and none but the typed conversions and forms on shards
    communicates.

    Keyword arguments stand in the order of the schema, which is that of operands in rules.
    """
    if node.op != "call_function" or is_getitem(node):
        return
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        raise failure(node, f"{op} is no op of a dispatcher")
    if op._schema.is_mutable:
        raise failure(node, f"{op} writes to its operands")
    own = op.namespace == "graphpar"
    if op.namespace in _COMMUNICATING or (own and not _has_place(node, program.form)):
        raise failure(node, f"{op} may not stand in a program of form {program.form!r}")
    names = [a.name for a in op._schema.arguments]
    if sorted(node.kwargs, key=names.index) != list(node.kwargs):
        raise failure(node, f"keyword arguments of {op} are out of order")


def _has_values(known: Info) -> bool:
    return known.replay or known.held


def check_regions(program: Program) -> None:
    """Each region is one run of consecutive nodes, keeps what its second runs read from outside,
    and these read nothing that is neither run again nor held."""
    for _, graph in program.graphs():
        ended, before = set[Any](), None
        for node in graph.nodes:
            region = info(node).region
            if region != before and before is not None:
                ended.add(before.number)
            before = region
            if region is None:
                continue
            if region.number in ended:
                raise failure(node, f"{node.name} is apart from its region {region.number}")
            if node.op != "call_function":
                raise failure(node, f"{node.name} cannot be in a region")
            for value in node.all_input_nodes:
                inside = info(value).region == region
                if value.op == "get_attr" or info(value).spec is None:
                    continue
                if not inside and value.name not in (*region.kept, *region.passed):
                    raise failure(node, f"region {region.number} is not given {value.name}")
                given = _has_values(info(value)) if inside else value.name in region.kept
                if info(node).replay and not given:
                    raise failure(node, f"{node.name} runs again, but {value.name} is not kept")
