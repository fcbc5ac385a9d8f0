"""verify: prove a program well-typed, from the rules alone.

Each check is a small function that raises :class:`VerifyError` with the node and its source
line. Types are re-derived op by op on fresh axes, from the types of placeholders and state: what
the planner decided is not trusted. If they agree, every gradient has the dual type of its value,
so parameters get whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar.axes import match_blocks
from graphpar.errors import VerifyError
from graphpar.ops import is_conversion, signature
from graphpar.passes.rules import local_call, op_axes, shard_strategy, tensor_arguments
from graphpar.program import (
    MESH_DIM,
    Program,
    TensorSpec,
    flat_nodes,
    info,
    is_getitem,
    one_type,
    outputs,
    placeholders,
    result_types,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard, Type, convertible, divides, letter, local_shape


def verify(program: Program) -> None:
    """Raise :class:`VerifyError` at the first thing that is wrong with the program."""
    for check in CHECKS[program.form]:
        check(program)


def _fail(node: fx.Node, message: str) -> VerifyError:
    error = VerifyError(f"{message}\n  at {info(node).source}")
    error.add_note(f"node {node.format_node()}, made by {info(node).origin}")
    return error


# --- structure ----------------------------------------------------------------------------------


def check_lint(program: Program) -> None:
    """The graphs are well-formed, and calls fit the blocks they name."""
    for _, graph in program.graphs():
        graph.lint()
    for node in program.call_nodes():
        block = program.calls.get(str(node.target), "")
        if block not in program.blocks:
            raise _fail(node, f"{node.target} names no block")
        entries = placeholders(program.blocks[block])
        if len(entries) != len(flat_nodes(node.args)):
            raise _fail(node, f"block {block} takes {len(entries)} values")


def check_provenance(program: Program) -> None:
    """Every op knows the user's line and the pass that made it."""
    for _, graph in program.graphs():
        for node in graph.nodes:
            if node.op == "call_function" and not (info(node).source.line and info(node).origin):
                raise _fail(node, f"{node.name} has no source line")


# --- types --------------------------------------------------------------------------------------


def check_types(program: Program) -> None:
    """Types re-derived op by op equal those on the nodes; outputs are Invariant."""
    for name, graph in program.graphs():
        for node in graph.nodes:
            derived = _derive(program, name, node)
            if derived is not None and derived != info(node).type:
                raise _fail(node, f"{node.name} is {derived}, not {info(node).type}")
    for node in flat_nodes(outputs(program.graph)):
        kind = info(node).type
        if kind != I and not (kind == R and not tensor_spec(node).differentiable):
            raise _fail(node, f"output {node.name} is {kind}, not Invariant")


def _derive(program: Program, block: str, node: fx.Node) -> Any:
    """The type of a node from those of its operands; ``None`` for the output node."""
    if node.op == "placeholder":
        return _entry(program, block, node)
    if node.op == "get_attr":
        return _state(program, block, node)
    if node.op == "call_module":
        return _call(program, node)
    if node.op == "output":
        return None
    if is_getitem(node):
        source, index = node.args
        return info(source).type[index]  # type: ignore[arg-type, index]
    if is_conversion(node.target):
        return _conversion(program, node)
    if node.target is torch.ops.graphpar.dropout.default:
        return _dropout(program, node)
    results = derive_types(node, program.ranks)
    spec, rest = info(node).spec, iter(results)
    if isinstance(spec, TensorSpec):
        return next(rest)
    return tuple(next(rest) if s is not None else I for s in spec or ())


def _entry(program: Program, block: str, node: fx.Node) -> Type:
    kind = _valid(program, node)
    if not block and not (kind == I or (kind == R and not tensor_spec(node).differentiable)):
        raise _fail(node, f"input {node.name} is {kind}, not Invariant")
    return kind


def _valid(program: Program, node: fx.Node) -> Type:
    """The node's declared type, if it fits its shape."""
    kind, shape = info(node).type, tensor_spec(node).shape
    if isinstance(kind, tuple) or kind is None:
        raise _fail(node, f"{node.name} has no type")
    if isinstance(kind, Shard) and not _fits(kind, shape, program.ranks):
        raise _fail(node, f"{kind} does not fit shape {shape} over {program.ranks} ranks")
    return kind


def _fits(kind: Shard, shape: tuple[int, ...], ranks: int) -> bool:
    return (
        0 <= kind.dim < len(shape) and sum(kind.blocks) == shape[kind.dim] and divides(kind, ranks)
    )


def _state(program: Program, block: str, node: fx.Node) -> Type:
    kind = _valid(program, node)
    for name in program.state_names(block, node):
        state = program.state[name]
        if state.type != kind:
            raise _fail(node, f"{name} is {state.type}, not {kind}")
        if kind == P or (kind == R and state.spec.differentiable):
            raise _fail(node, f"state {name} cannot be {kind}")
    return kind


def _call(program: Program, node: fx.Node) -> tuple[Type, ...]:
    graph = program.blocks[program.calls[str(node.target)]]
    for argument, entry in zip(flat_nodes(node.args), placeholders(graph), strict=True):
        if info(argument).type != info(entry).type:
            raise _fail(
                node, f"{argument.name} is {info(argument).type}, block wants {info(entry).type}"
            )
    return tuple(info(n).type for n in flat_nodes(outputs(graph)))  # type: ignore[misc]


def _conversion(program: Program, node: fx.Node) -> Type:
    value, *args = node.args
    assert isinstance(value, fx.Node)
    assert isinstance(node.target, torch._ops.OpOverload)
    source, target = signature(node.target, args)
    shape = tensor_spec(value).shape
    if args[-1] != MESH_DIM:
        raise _fail(node, f"{args[-1]!r} is no mesh dimension of the program")
    if info(value).type != source:
        raise _fail(node, f"{node.name} converts {source}, but {value.name} is {info(value).type}")
    for kind in (source, target):
        if isinstance(kind, Shard) and not _fits(kind, shape, program.ranks):
            raise _fail(node, f"{kind} does not fit shape {shape}")
    if not convertible(source, target):
        raise _fail(node, f"no conversion from {source} to {target}")
    if tensor_spec(node).shape != shape:
        raise _fail(node, "a conversion keeps the whole tensor's shape")
    return target


def _dropout(program: Program, node: fx.Node) -> Type:
    x, _, _, dim, blocks, group = node.args
    assert isinstance(x, fx.Node)
    kind = Shard(int(dim), tuple(blocks))  # type: ignore[arg-type]
    if info(x).type != kind or group != MESH_DIM:
        raise _fail(node, f"{x.name} is {info(x).type}, its dropout wants {kind}")
    return kind


def derive_types(node: fx.Node, ranks: int) -> tuple[Type, ...]:
    """The types of an op's results from those of its operands, by the op's rule alone."""
    op = op_axes(node)
    nodes = tensor_arguments(node)
    kinds = [info(n).type for n in nodes]
    letters = {letter(k) for k in kinds}  # type: ignore[arg-type]
    if letters <= {"I"} or letters <= {"R"}:
        return _unsharded(node, kinds, op, ranks)
    if "I" in letters:
        raise _fail(node, f"Invariant mixes with nothing else: operands are {_list(kinds)}")
    if op.opaque:
        raise _fail(node, f"{node.target} has no rule and cannot take {_list(kinds)}")
    if "P" in letters:
        through = frozenset(i for i, k in enumerate(kinds) if k == P)
        if "S" in letters or through not in op.partial:
            raise _fail(node, f"{node.target} is not linear in Partial operands: {_list(kinds)}")
        return (P,) * len(op.results)
    cuts = _cuts(node, dict(enumerate(kinds)), op.operands, ranks)  # type: ignore[arg-type]
    return _sharded(node, op, cuts, ranks)


def _unsharded(node: fx.Node, kinds: list[Any], op: Any, ranks: int) -> tuple[Type, ...]:
    declared = info(node).type
    results = declared if isinstance(declared, tuple) else (declared,)
    places = {i: k for i, k in enumerate(results) if isinstance(k, Shard)}
    if places and "I" not in {letter(k) for k in kinds}:
        # A new axis, such as expand makes, may be sharded though no operand has it.
        return _sharded(node, op, _cuts(node, places, op.results, ranks), ranks)
    if not kinds:
        kind = R if R in results else I
    else:
        kind = kinds[0]
    return (kind,) * len(op.results)


def _cuts(
    node: fx.Node, kinds: Mapping[int, Type], dims: Any, ranks: int
) -> dict[Any, tuple[int, ...]]:
    cuts: dict[Any, tuple[int, ...]] = {}
    for place, kind in kinds.items():
        if isinstance(kind, Shard):
            found = match_blocks(dims[place][kind.dim], kind.blocks, ranks)
            if found is None or any(cuts.get(a, b) != b for a, b in found.items()):
                raise _fail(node, f"{node.target} cannot run on {kind}")
            cuts |= found
    return cuts


def _sharded(node: fx.Node, op: Any, cuts: Any, ranks: int) -> tuple[Type, ...]:
    strategy = shard_strategy(op, cuts, ranks)
    if strategy is None:
        raise _fail(node, f"{node.target} needs an axis whole that is sharded")
    kinds = [info(n).type for n in tensor_arguments(node)]
    if list(strategy.operands) != kinds:
        raise _fail(node, f"operands are {_list(kinds)}, not {_list(strategy.operands)}")
    if op.average and P in strategy.results:
        raise _fail(node, f"{node.target} over a sharded axis is not the mean of the whole")
    return strategy.results


def _list(kinds: Any) -> str:
    return ", ".join(map(str, kinds)) or "none"


# --- local tensors ------------------------------------------------------------------------------


def check_local_arguments(program: Program) -> None:
    """Size arguments are those that the rules give for the types."""
    for _, graph in program.graphs():
        for node in graph.nodes:
            if not _is_aten(node):
                continue
            kinds = [one_type(n) for n in tensor_arguments(node)]
            wanted = local_call(node, kinds, result_types(node), program.ranks)
            if wanted != (tuple(node.args), dict(node.kwargs)):
                raise _fail(node, f"arguments of {node.name} are not those of one rank")


def check_shapes(program: Program) -> None:
    """Each op, run on fake tensors of its operands' shapes, gives its result's shape."""
    mode = FakeTensorMode()
    ranks = program.ranks if program.form == "local" else 1

    def fake(node: fx.Node) -> torch.Tensor:
        spec = tensor_spec(node)
        kind: Any = info(node).type or I
        shape = local_shape(spec.shape, kind, ranks)
        return torch.empty(shape, dtype=spec.dtype, device=spec.device)

    for _, graph in program.graphs():
        for node in graph.nodes:
            if not _is_aten(node):
                continue
            with mode:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), fake)
                found = node.target(*args, **kwargs)
            _compare_shapes(node, found, ranks)


def _compare_shapes(node: fx.Node, found: Any, ranks: int) -> None:
    spec, kind = info(node).spec, info(node).type
    specs = spec if isinstance(spec, tuple) else (spec,)
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(specs)
    values = found if isinstance(found, (tuple, list)) else (found,)
    for each, declared, value in zip(specs, kinds, values, strict=True):
        if each is None:
            continue
        wanted = local_shape(each.shape, declared or I, ranks)
        if tuple(value.shape) != wanted or value.dtype != each.dtype:
            raise _fail(
                node, f"{node.name} is {value.dtype}{list(value.shape)}, not {each.dtype}{wanted}"
            )


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


_STRUCTURE = (check_lint, check_provenance, check_shapes)

CHECKS: Mapping[str, tuple[Callable[[Program], None], ...]] = {
    "whole": _STRUCTURE,
    "typed": (*_STRUCTURE, check_types),
    "local": (*_STRUCTURE, check_types, check_local_arguments),
}
