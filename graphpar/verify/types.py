"""Types: those on the nodes are the derived ones, and local arguments fit them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpar.errors import VerifyError
from graphpar.passes.rules import is_form, local_call, op_axes, summed_size
from graphpar.program import Program, flat_nodes, info, outputs, result_types, tensor_spec
from graphpar.types import I, P, R, Shard, fits
from graphpar.verify.derive import derive_type, listed, may_cross
from graphpar.verify.node import failure, is_op, operand_types, per_node

aten = torch.ops.aten


def check_state(program: Program) -> None:
    """Parameters are Invariant or cut; the rest is whole.

    A parameter without a gradient may get one later, so it is not Replicate.
    """
    for name, state in program.state.items():
        kind, spec = state.type, state.spec
        if state.kind != "parameter":
            legal = may_cross(kind, spec)
        elif isinstance(kind, Shard):
            legal = fits(kind, spec.shape, program.ranks)
        else:
            legal = kind == I
        if not legal:
            raise VerifyError(f"{state.kind} {name} of shape {list(spec.shape)} cannot be {kind}")


@per_node
def check_types(program: Program, block: str, node: fx.Node) -> None:
    """Types re-derived op by op equal those on the nodes; outputs are Invariant."""
    if node.op != "output":
        derived = derive_type(program, block, node)
        if derived != info(node).type:
            raise failure(node, f"{node.name} is {derived}, not {info(node).type}")
    elif not block:
        for value in flat_nodes(outputs(program.graph)):
            if not may_cross(info(value).type, tensor_spec(value)):
                raise failure(value, f"output {value.name} is {info(value).type}, not Invariant")


@per_node
def check_random(program: Program, block: str, node: fx.Node) -> None:
    """What is random draws the same on every rank, so it takes no shards.

    Only dropout may, until localize makes it draw the whole tensor's mask.
    """
    if not _draws(node) or (program.form == "typed" and node.target is aten.dropout.default):
        return
    kinds = [*operand_types(node), *result_types(node)]
    if not all(kind in (I, R) for kind in kinds):
        raise failure(node, f"{node.target} would draw other numbers on {listed(kinds)}")


def _draws(node: fx.Node) -> bool:
    op: Any = node.target
    if not is_op(node):
        return False
    named = {a.name: a.default_value for a in op._schema.arguments}
    named |= dict(zip(named, node.args, strict=False)) | node.kwargs
    off = named.get("dropout_p", named.get("p")) == 0 or named.get("train") is False
    return torch.Tag.nondeterministic_seeded in op.tags and not off


@per_node
def check_local_arguments(program: Program, block: str, node: fx.Node) -> None:
    """The op is the one that the rules give for the types: its own form on shards where they ask
    for it, with the size arguments of one rank."""
    if not is_op(node) and not is_form(node.target):
        return
    given = (tuple(node.args), dict(node.kwargs))
    if _nodes(info(node).whole_call or given) != _nodes(given):
        raise failure(node, f"{node.name} and its call on whole tensors have other operands")
    target, *wanted = local_call(node, operand_types(node), result_types(node), program.ranks)
    if target != node.target:
        raise failure(node, f"one rank runs {target}, not {node.target}")
    if tuple(wanted) != given:
        raise failure(node, f"arguments of {node.name} are not those of one rank")


def _nodes(call: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(call, found.append)
    return found


@per_node
def check_means(program: Program, block: str, node: fx.Node) -> None:
    """A mean over a sharded axis is a sum divided by the number of all elements."""
    if not is_op(node):
        return
    if P not in result_types(node) or P in operand_types(node):
        return
    if op_axes(node).average:
        raise failure(node, f"{node.target} over a sharded axis is not the mean of the whole")
    if info(node).origin == "localize":
        count = summed_size(node)
        if [(n.target, n.args) for n in node.users] != [(aten.div.Tensor, (node, count))]:
            raise failure(node, f"{node.name}, a sum in place of a mean, is not divided by {count}")
