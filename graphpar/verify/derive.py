"""The type of a node from those of its operands, on fresh axes, by the rules alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphpar.axes import OpAxes, match_blocks
from graphpar.ops import is_conversion, signature
from graphpar.ops.table import group_of
from graphpar.passes.rules import op_axes, shard_strategy
from graphpar.program import (
    MESH_DIM,
    Program,
    TensorSpec,
    flat_nodes,
    info,
    is_getitem,
    outputs,
    placeholders,
    result_types,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard, Type, convertible, fits, letter, split_layout
from graphpar.verify.node import SEEDED, SEEDS, failure, operand_types


def derive_type(program: Program, block: str, node: fx.Node) -> Any:
    """The type of a node from those of its operands."""
    if node.op == "placeholder":
        kind = _valid(program, node)
        if not block and not may_cross(kind, tensor_spec(node)):
            raise failure(node, f"input {node.name} is {kind}, not Invariant")
        return kind
    if node.op == "get_attr":
        return _state(program, block, node)
    if node.op == "call_module":
        return _call(program, node)
    if is_getitem(node):
        source, index = node.args
        return info(source).type[index]  # type: ignore[arg-type, index]
    if is_conversion(node.target):
        return _conversion(program, node)
    if node.target is torch.ops.graphpar.dropout.default:
        return _dropout(node)
    if node.target in SEEDS:
        return R
    if node.target in SEEDED:
        return _seeded(node)
    results = derive_types(node, program.ranks)
    spec, rest = info(node).spec, iter(results)
    if isinstance(spec, TensorSpec):
        return next(rest)
    return tuple(next(rest) if s is not None else I for s in spec or ())


def _valid(program: Program, node: fx.Node) -> Type:
    """The node's declared type, if it fits its shape."""
    kind, shape = info(node).type, tensor_spec(node).shape
    if isinstance(kind, tuple) or kind is None:
        raise failure(node, f"{node.name} has no type")
    if isinstance(kind, Shard) and not fits(kind, shape, program.ranks):
        raise failure(node, f"{kind} does not fit shape {shape} over {program.ranks} ranks")
    return kind


def _state(program: Program, block: str, node: fx.Node) -> Type:
    kind = _valid(program, node)
    for name in program.state_names(block, node):
        if program.state[name].type != kind:
            raise failure(node, f"{name} is {program.state[name].type}, not {kind}")
    return kind


def _call(program: Program, node: fx.Node) -> tuple[Type, ...]:
    graph = program.blocks[program.calls[str(node.target)]]
    for argument, entry in zip(flat_nodes(node.args), placeholders(graph), strict=True):
        if info(argument).type != info(entry).type:
            raise failure(
                node, f"{argument.name} is {info(argument).type}, block wants {info(entry).type}"
            )
    return tuple(info(n).type for n in flat_nodes(outputs(graph)))  # type: ignore[misc]


def _conversion(program: Program, node: fx.Node) -> Type:
    value, *args = node.args
    assert isinstance(value, fx.Node)
    assert isinstance(node.target, torch._ops.OpOverload)
    source, target = signature(node.target, args)
    group = group_of(node.target, args)
    if group != MESH_DIM:
        raise failure(node, f"{group!r} is no mesh dimension of the program")
    if info(value).type != source:
        raise failure(
            node, f"{node.name} converts {source}, but {value.name} is {info(value).type}"
        )
    for kind in (source, target):
        if isinstance(kind, Shard) and not fits(kind, tensor_spec(value).shape, program.ranks):
            raise failure(node, f"{kind} does not fit shape {tensor_spec(value).shape}")
    if not convertible(source, target):
        raise failure(node, f"no conversion from {source} to {target}")
    return target


def _dropout(node: fx.Node) -> Type:
    (x, _, _), kind, group = split_layout(node.args)
    if info(x).type != kind or group != MESH_DIM:
        raise failure(node, f"{x.name} is {info(x).type}, its dropout wants {kind}")
    return kind


def _seeded(node: fx.Node) -> Type:
    """Without blocks the value is whole, and so is its mask."""
    x, seed, _, _, *place = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(seed, fx.Node)
    if info(seed).type != R:
        raise failure(node, f"{seed.name} is {info(seed).type}: every rank needs the same seed")
    kind = info(x).type
    if place:
        _, layout, group = split_layout(place)
        fitting = kind == layout and group == MESH_DIM
    else:
        fitting = kind in (I, R)
    if not fitting:
        raise failure(node, f"{x.name} is {kind}, its dropout is not of that")
    return kind  # type: ignore[return-value]


def derive_types(node: fx.Node, ranks: int) -> tuple[Type, ...]:
    """The types of an op's results from those of its operands, by the op's rule alone."""
    op = op_axes(node)
    kinds = operand_types(node)
    letters = {letter(k) for k in kinds}
    if letters <= {"I"} or letters <= {"R"}:
        return _unsharded(node, kinds, op, ranks)
    if "I" in letters:
        raise failure(node, f"Invariant mixes with nothing else: operands are {listed(kinds)}")
    if op.opaque:
        raise failure(node, f"{node.target} has no rule and cannot take {listed(kinds)}")
    if "P" in letters:
        through = frozenset(i for i, k in enumerate(kinds) if k == P)
        if "S" in letters or through not in op.partial:
            raise failure(node, f"{node.target} is not linear in Partial operands: {listed(kinds)}")
        return (P,) * len(op.results)
    return _sharded(node, op, dict(enumerate(kinds)), op.operands, ranks)


def _unsharded(node: fx.Node, kinds: list[Any], op: Any, ranks: int) -> tuple[Type, ...]:
    results = result_types(node)
    places = {i: k for i, k in enumerate(results) if isinstance(k, Shard)}
    if places and I not in kinds:
        # A new axis, such as expand makes, may be sharded though no operand has it.
        return _sharded(node, op, places, op.results, ranks)
    if not kinds:
        kind = R if R in results else I
    else:
        kind = kinds[0]
    return (kind,) * len(op.results)


def _sharded(
    node: fx.Node, op: OpAxes, kinds: Mapping[int, Type], dims: Any, ranks: int
) -> tuple[Type, ...]:
    """The results' types if the values of ``dims`` at these places are of these types."""
    shards = {place: kind for place, kind in kinds.items() if isinstance(kind, Shard)}
    units = max(kind.units for kind in shards.values())
    cuts: dict[Any, tuple[int, ...]] = {}
    for place, kind in shards.items():
        found = match_blocks(dims[place][kind.dim], kind.blocks, units or ranks)
        if kind.units != units or not found or any(cuts.get(a, b) != b for a, b in found.items()):
            raise failure(node, f"{node.target} cannot run on {kind}")
        cuts |= found
    strategy = shard_strategy(op, cuts, ranks, units)
    if strategy is None:
        raise failure(node, f"{node.target} needs an axis whole that is sharded")
    given = operand_types(node)
    if list(strategy.operands) != given:
        raise failure(node, f"operands are {listed(given)}, not {listed(strategy.operands)}")
    return strategy.results


def listed(kinds: Any) -> str:
    return ", ".join(map(str, kinds)) or "none"


def may_cross(kind: Any, spec: TensorSpec) -> bool:
    """Whether a whole value of the caller may have the type: without a gradient, Replicate and
    Invariant are the same."""
    return kind == I or (kind == R and not spec.differentiable)
