"""verify: prove a program well-typed, from the rules alone.

Each check is a small function that raises :class:`VerifyError` with the node and its source
line. Shapes are re-derived by running each op on fake tensors, types op by op on fresh axes, from
the types of placeholders and state: what the planner decided is not trusted. If they agree, the
program computes what it would compute without its conversions, and every gradient has the dual
type of its value, so parameters get whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphpar.axes import match_blocks
from graphpar.errors import VerifyError
from graphpar.ops import is_conversion, signature
from graphpar.passes.rules import local_call, op_axes, shard_strategy, tensor_arguments
from graphpar.program import (
    Program,
    TensorSpec,
    flat_nodes,
    info,
    is_getitem,
    output_node,
    outputs,
    placeholders,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard, Type, convertible, divides, letter, local_shape

MESH_DIM = "tp"
aten = torch.ops.aten

Check = Callable[[Program], None]


def verify(program: Program) -> None:
    """Raise :class:`VerifyError` at the first thing that is wrong with the program."""
    for check in CHECKS[program.form]:
        check(program)


def _fail(node: fx.Node, message: str) -> VerifyError:
    error = VerifyError(f"{message}\n  at {info(node).source}")
    error.add_note(f"node {node.format_node()}, made by {info(node).origin}")
    return error


def _per_node(check: Callable[[Program, str, fx.Node], None]) -> Check:
    """Run the check on every node of every block and of the root; all that it raises names the
    node."""

    @wraps(check)
    def run(program: Program) -> None:
        for block, graph in program.graphs():
            for node in graph.nodes:
                try:
                    check(program, block, node)
                except VerifyError:
                    raise
                except Exception as error:
                    raise _fail(node, f"{node.name}: {error or type(error).__name__}") from error

    return run


# --- structure ----------------------------------------------------------------------------------


def check_lint(program: Program) -> None:
    """The graphs are well-formed; the root has the inputs and outputs that the program names."""
    for name, graph in program.graphs():
        try:
            graph.lint()
        except RuntimeError as error:
            raise VerifyError(f"graph {name or 'forward'} is malformed: {error}") from error
    end, values = output_node(program.graph), outputs(program.graph)
    if len(placeholders(program.graph)) != len(program.placeholders):
        raise _fail(end, f"the root does not take {len(program.placeholders)} inputs")
    count = program.out_spec.num_leaves
    if len(values) != count + len(program.mutations):
        raise _fail(end, f"the root does not give {count} outputs and the mutated buffers")
    for name, value in zip(program.mutations, values[count:], strict=True):
        state = program.state.get(name)
        if state is None or state.kind != "buffer" or not isinstance(value, fx.Node):
            raise _fail(end, f"{name} is no buffer that the root can write to")
        if not _same(tensor_spec(value), state.spec):
            raise _fail(value, f"{value.name} does not fit buffer {name}")


def _same(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two specs are equal but for ``differentiable``."""
    return replace(a, differentiable=b.differentiable) == b


@_per_node
def check_provenance(program: Program, block: str, node: fx.Node) -> None:
    """Every op knows the user's line and the pass that made it."""
    if node.op == "call_function" and not (info(node).source.line and info(node).origin):
        raise _fail(node, f"{node.name} has no source line")


@_per_node
def check_links(program: Program, block: str, node: fx.Node) -> None:
    """State, blocks and items of tuples are what the nodes that read them take them for."""
    spec = info(node).spec
    if node.op == "get_attr":
        for name in program.state_names(block, node):
            if name not in program.state or program.state[name].spec != spec:
                raise _fail(node, f"{node.name} is not the tensor of {name}")
    elif node.op == "call_module":
        graph = program.blocks.get(program.calls.get(str(node.target), ""))
        if graph is None or block:
            raise _fail(node, f"{node.target} names no block")
        entries, exits = placeholders(graph), outputs(graph)
        if node.kwargs or [*map(_spec, node.args)] != [*map(_spec, entries)]:
            raise _fail(node, f"{node.target} takes {', '.join(n.name for n in entries)}")
        if spec != tuple(map(_spec, exits)):
            raise _fail(node, f"{node.target} gives other values")
    elif is_getitem(node):
        source, index = node.args
        items = _spec(source)
        if not isinstance(items, tuple) or index not in range(len(items)) or items[index] != spec:
            raise _fail(node, f"{node.name} is not item {index} of {source}")


def _spec(value: Any) -> Any:
    return info(value).spec


_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


@_per_node
def check_ops(program: Program, block: str, node: fx.Node) -> None:
    """Ops have no side effects, and none but the typed conversions communicates.

    Keyword arguments stand in the order of the schema, which is that of operands in rules.
    """
    if node.op != "call_function" or is_getitem(node):
        return
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        raise _fail(node, f"{op} is no op of a dispatcher")
    if op._schema.is_mutable:
        raise _fail(node, f"{op} writes to its operands")
    own = is_conversion(op) and program.form != "whole"
    own |= op is torch.ops.graphpar.dropout.default and program.form == "local"
    if op.namespace in _COMMUNICATING or (op.namespace == "graphpar" and not own):
        raise _fail(node, f"{op} may not stand in a program of form {program.form!r}")
    names = [a.name for a in op._schema.arguments]
    if sorted(node.kwargs, key=names.index) != list(node.kwargs):
        raise _fail(node, f"keyword arguments of {op} are out of order")


# --- shapes -------------------------------------------------------------------------------------


@_per_node
def check_shapes(program: Program, block: str, node: fx.Node) -> None:
    """Each op, run on fake tensors of its operands' whole shapes, gives its result's."""
    if _is_graphpar(node):
        if tensor_spec(node) != tensor_spec(node.args[0]):  # type: ignore[arg-type]
            raise _fail(node, f"{node.target} keeps the whole tensor's shape")
    elif _is_op(node):
        _compare_shapes(node, info(node).whole_call or (node.args, node.kwargs), 1)


@_per_node
def check_local_shapes(program: Program, block: str, node: fx.Node) -> None:
    """So it does on the shapes of one rank."""
    if _is_op(node):
        _compare_shapes(node, (node.args, node.kwargs), program.ranks)


def _is_op(node: fx.Node) -> bool:
    """Whether the node runs an op that the rules know, not one of graphpar's own."""
    return isinstance(node.target, torch._ops.OpOverload) and not _is_graphpar(node)


def _is_graphpar(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "graphpar"


def _compare_shapes(node: fx.Node, call: Any, ranks: int) -> None:
    def local(spec: TensorSpec, kind: Any) -> TensorSpec:
        return replace(spec, shape=local_shape(spec.shape, kind or I, ranks))

    args, kwargs = fx.node.map_arg(call, lambda n: local(tensor_spec(n), info(n).type))
    spec, kind = info(node).spec, info(node).type
    specs = spec if isinstance(spec, tuple) else (spec,)
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(specs)
    leaves = tuple(map(type, pytree.tree_leaves((args, kwargs))))
    found = _fake_results(node.target, _frozen(args), _frozen(kwargs), leaves)
    for each, declared, result in zip(specs, kinds, found, strict=True):
        wanted = None if each is None else local(each, declared)
        if wanted is None or result is None:
            if wanted is not result:
                raise _fail(node, f"{node.name} gives {result}, not {wanted}")
        elif (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            is_, is_not = (f"{s.dtype}{list(s.shape)}" for s in (result, wanted))
            raise _fail(node, f"{node.name} is {is_}, not {is_not}")
        elif result.differentiable and not wanted.differentiable:
            raise _fail(node, f"{node.name} has a gradient, but is said to have none")


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=1 << 14)
def _fake_results(
    target: Any, args: Any, kwargs: Any, leaves: tuple[type, ...]
) -> tuple[TensorSpec | None, ...]:
    """What the op gives on tensors of the given specs; it depends on nothing else.

    ``leaves`` are the types of the arguments: 1 and 1.0 are one key without them.
    """

    def tensor(value: Any) -> Any:
        if not isinstance(value, TensorSpec):
            return value
        return torch.empty(
            value.shape,
            dtype=value.dtype,
            device=value.device,
            requires_grad=value.differentiable,
        )

    with FakeTensorMode(), torch.enable_grad():
        found = target(*fx.node.map_aggregate(args, tensor), **{
            k: fx.node.map_aggregate(v, tensor) for k, v in kwargs
        })
    values = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(
        TensorSpec(tuple(v.shape), v.dtype, v.device, v.requires_grad)
        if isinstance(v, torch.Tensor)
        else None
        for v in values
    )


# --- types --------------------------------------------------------------------------------------


def check_state(program: Program) -> None:
    """Parameters are Invariant or cut into equal blocks, as a DTensor is; the rest is whole."""
    for name, state in program.state.items():
        kind, spec = state.type, state.spec
        if isinstance(kind, Shard):
            equal = state.kind == "parameter" and len(set(kind.blocks)) == 1
            legal = equal and _fits(kind, spec.shape, program.ranks)
        else:
            legal = _may_cross(kind, spec)
        if not legal:
            raise VerifyError(f"{state.kind} {name} of shape {list(spec.shape)} cannot be {kind}")


@_per_node
def check_types(program: Program, block: str, node: fx.Node) -> None:
    """Types re-derived op by op equal those on the nodes; outputs are Invariant."""
    if node.op != "output":
        derived = _derive(program, block, node)
        if derived != info(node).type:
            raise _fail(node, f"{node.name} is {derived}, not {info(node).type}")
    elif not block:
        for value in flat_nodes(outputs(program.graph)):
            if not _may_cross(info(value).type, tensor_spec(value)):
                raise _fail(value, f"output {value.name} is {info(value).type}, not Invariant")


def _may_cross(kind: Any, spec: TensorSpec) -> bool:
    """Whether a whole value of the caller may have the type: without a gradient, Replicate and
    Invariant are the same."""
    return kind == I or (kind == R and not spec.differentiable)


def _derive(program: Program, block: str, node: fx.Node) -> Any:
    """The type of a node from those of its operands."""
    if node.op == "placeholder":
        kind = _valid(program, node)
        if not block and not _may_cross(kind, tensor_spec(node)):
            raise _fail(node, f"input {node.name} is {kind}, not Invariant")
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
    results = derive_types(node, program.ranks)
    spec, rest = info(node).spec, iter(results)
    if isinstance(spec, TensorSpec):
        return next(rest)
    return tuple(next(rest) if s is not None else I for s in spec or ())


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
        0 <= kind.dim < len(shape)
        and sum(kind.blocks) == shape[kind.dim]
        and min(kind.blocks, default=0) > 0
        and divides(kind, ranks)
    )


def _state(program: Program, block: str, node: fx.Node) -> Type:
    kind = _valid(program, node)
    for name in program.state_names(block, node):
        if program.state[name].type != kind:
            raise _fail(node, f"{name} is {program.state[name].type}, not {kind}")
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
    if args[-1] != MESH_DIM:
        raise _fail(node, f"{args[-1]!r} is no mesh dimension of the program")
    if info(value).type != source:
        raise _fail(node, f"{node.name} converts {source}, but {value.name} is {info(value).type}")
    for kind in (source, target):
        if isinstance(kind, Shard) and not _fits(kind, tensor_spec(value).shape, program.ranks):
            raise _fail(node, f"{kind} does not fit shape {tensor_spec(value).shape}")
    if not convertible(source, target):
        raise _fail(node, f"no conversion from {source} to {target}")
    return target


def _dropout(node: fx.Node) -> Type:
    x, _, _, dim, blocks, group = node.args
    assert isinstance(x, fx.Node)
    kind = Shard(int(dim), tuple(blocks))  # type: ignore[arg-type]
    if info(x).type != kind or group != MESH_DIM:
        raise _fail(node, f"{x.name} is {info(x).type}, its dropout wants {kind}")
    return kind


def derive_types(node: fx.Node, ranks: int) -> tuple[Type, ...]:
    """The types of an op's results from those of its operands, by the op's rule alone."""
    op = op_axes(node)
    kinds = operand_types(node)
    letters = {letter(k) for k in kinds}
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
    return _sharded(node, op, _cuts(node, dict(enumerate(kinds)), op.operands, ranks), ranks)


def operand_types(node: fx.Node) -> list[Any]:
    """The types of an op's tensor arguments."""
    return [info(n).type for n in tensor_arguments(node)]


def result_types(node: fx.Node) -> list[Any]:
    """The declared types of an op's tensor results."""
    kind, spec = info(node).type, info(node).spec
    if not isinstance(spec, tuple):
        return [kind]
    assert isinstance(kind, tuple)
    return [k for k, s in zip(kind, spec, strict=True) if s is not None]


def _unsharded(node: fx.Node, kinds: list[Any], op: Any, ranks: int) -> tuple[Type, ...]:
    results = result_types(node)
    places = {i: k for i, k in enumerate(results) if isinstance(k, Shard)}
    if places and I not in kinds:
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
    kinds = operand_types(node)
    if list(strategy.operands) != kinds:
        raise _fail(node, f"operands are {_list(kinds)}, not {_list(strategy.operands)}")
    return strategy.results


def _list(kinds: Any) -> str:
    return ", ".join(map(str, kinds)) or "none"


@_per_node
def check_random(program: Program, block: str, node: fx.Node) -> None:
    """What is random draws the same on every rank, so it takes no shards.

    Only dropout may, until localize makes it draw the whole tensor's mask.
    """
    if not _draws(node) or (program.form == "typed" and node.target is aten.dropout.default):
        return
    kinds = [*operand_types(node), *result_types(node)]
    if not all(kind in (I, R) for kind in kinds):
        raise _fail(node, f"{node.target} would draw other numbers on {_list(kinds)}")


def _draws(node: fx.Node) -> bool:
    op: Any = node.target
    if not _is_op(node):
        return False
    named = {a.name: a.default_value for a in op._schema.arguments}
    named |= dict(zip(named, node.args, strict=False)) | node.kwargs
    off = named.get("dropout_p", named.get("p")) == 0 or named.get("train") is False
    return torch.Tag.nondeterministic_seeded in op.tags and not off


# --- local tensors ------------------------------------------------------------------------------


@_per_node
def check_local_arguments(program: Program, block: str, node: fx.Node) -> None:
    """Size arguments are those that the rules give for the types."""
    if not _is_op(node):
        return
    given = (tuple(node.args), dict(node.kwargs))
    if [*_nodes(info(node).whole_call or given)] != [*_nodes(given)]:
        raise _fail(node, f"{node.name} and its call on whole tensors have other operands")
    wanted = local_call(node, operand_types(node), result_types(node), program.ranks)
    if wanted != given:
        raise _fail(node, f"arguments of {node.name} are not those of one rank")


def _nodes(call: Any) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(call, found.append)
    yield from found


@_per_node
def check_means(program: Program, block: str, node: fx.Node) -> None:
    """A mean over a sharded axis is a sum divided by the number of all elements."""
    if not _is_op(node):
        return
    if P not in result_types(node) or P in operand_types(node):
        return
    if op_axes(node).average:
        raise _fail(node, f"{node.target} over a sharded axis is not the mean of the whole")
    if info(node).origin == "localize":
        x = tensor_arguments(node)[0]
        count = tensor_spec(x).numel // math.prod(tensor_spec(node).shape)
        if [(n.target, n.args) for n in node.users] != [(aten.div.Tensor, (node, count))]:
            raise _fail(node, f"{node.name}, a sum in place of a mean, is not divided by {count}")


_STRUCTURE: tuple[Check, ...] = (check_lint, check_provenance, check_links, check_ops)
_TYPES: tuple[Check, ...] = (check_state, check_types, check_random)
_LOCAL: tuple[Check, ...] = (check_means, check_local_arguments)

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "whole": (*_STRUCTURE, check_shapes),
    "typed": (*_STRUCTURE, *_TYPES, check_shapes),
    "local": (*_STRUCTURE, *_TYPES, *_LOCAL, check_shapes, check_local_shapes),
}
