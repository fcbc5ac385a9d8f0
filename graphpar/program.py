"""The intermediate representation: one forward FX graph, its blocks, its state.

A :class:`Program` is a root graph of pre-dispatch ATen ops. ``placeholder`` nodes are the tensor
leaves of the call's arguments, ``get_attr`` nodes read state (parameters, buffers, constants) by
their original names, and the output node holds the flat outputs, then the new values of mutated
buffers. A ``call_module`` node runs a *block*: a graph shared by all equal layers, whose
``get_attr`` names are relative to the called path.

Passes never edit the program they are given: they copy its graphs (:func:`copy_graph`).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec

from graphpar.axes import Dims, OpAxes
from graphpar.errors import InternalError
from graphpar.provenance import UNKNOWN, Source
from graphpar.types import I, Type

_SLOT = "graphpar"

MESH_DIM = "tp"
"""The mesh dimension that a program is partitioned over; conversions name it as their group."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The whole (global) tensor: shape, dtype, device, and whether it carries a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = False

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def spec_of(value: Tensor, *, differentiable: bool = False) -> TensorSpec:
    return TensorSpec(tuple(map(int, value.shape)), value.dtype, value.device, differentiable)


Form = Literal["whole", "typed", "local"]
"""What a program's graphs are: ops on whole tensors, with types that agree, on local tensors."""

Spec = TensorSpec | tuple["TensorSpec | None", ...] | None
"""A node's value: a tensor, a tuple of tensors (``None`` for a non-tensor), or no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Consecutive nodes of a graph that backward runs again, up to what it needs of them.

    Nodes are named. Autograd keeps ``kept`` of what the region reads; ``passed`` is read by nodes
    that are not run again. ``random``: what runs again draws from the device's generator.
    """

    number: int
    kept: tuple[str, ...]
    passed: tuple[str, ...] = ()
    random: bool = False


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument whose value differs between ranks, such as a size: one value per rank."""

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"ops.on_rank({self.values}, {MESH_DIM})"


def per_rank(values: Sequence[Any]) -> Any:
    """One argument from that of each rank: lists element by element."""
    first = values[0]
    if all(type(value) is type(first) and value == first for value in values):
        return first
    if isinstance(first, list) and len({len(value) for value in values}) == 1:
        return [per_rank(each) for each in zip(*values, strict=True)]
    return PerRank(tuple(values))


def of_rank(arguments: Any, rank: int) -> Any:
    """``arguments`` as one rank has them."""

    def pick(value: Any) -> Any:
        return value.values[rank] if isinstance(value, PerRank) else value

    return fx.node.map_aggregate(arguments, pick)


@dataclass(frozen=True, slots=True)
class Info:
    """All that graphpar knows of a node; replaced whole, never edited.

    ``spec`` is the global value. ``dims`` are the axes of each dimension, of one output or of
    each output, and ``axes`` the op's rule in terms of them. ``type`` is the partition type, of
    one output or of each. ``operands`` are the types its tensor arguments must have, decided by
    annotate-partitions and met by insert-collectives. ``whole_call`` are the arguments of the op
    on the whole tensors, where localize changed them. ``replay`` says that backward runs the node
    again, decided by choose-recompute; apply-recompute puts it in a ``region``, with the nodes
    that autograd would keep its results for; ``held``: what it makes is kept, for backward or for
    its region's second run.
    """

    spec: Spec
    source: Source = UNKNOWN
    origin: str = "trace"
    dims: Dims | tuple[Dims | None, ...] | None = None
    axes: OpAxes | None = None
    type: Type | tuple[Type, ...] | None = None
    operands: tuple[Type, ...] | None = None
    whole_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    replay: bool = False
    region: Region | None = None
    held: bool = False


def info(node: fx.Node) -> Info:
    found = node.meta.get(_SLOT)
    if not isinstance(found, Info):
        raise InternalError(f"node {node.name} carries no graphpar information")
    return found


def set_info(node: fx.Node, value: Info) -> None:
    # Node's own __setattr__ puts the node into the graph's table of ops anew.
    object.__setattr__(node, "meta", {_SLOT: value})


def annotate(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the node's :class:`Info`."""
    set_info(node, replace(info(node), **changes))


def tensor_spec(node: fx.Node) -> TensorSpec:
    """The spec of a node that is known to hold one tensor."""
    spec = info(node).spec
    if not isinstance(spec, TensorSpec):
        raise InternalError(f"node {node.name} does not hold one tensor")
    return spec


def one_type(node: fx.Node) -> Type:
    """The partition type of a node that holds one tensor."""
    kind = info(node).type
    if kind is None or isinstance(kind, tuple):
        raise InternalError(f"node {node.name} has no single partition type")
    return kind


def result_types(node: fx.Node) -> list[Type]:
    """The types of the node's tensor results."""
    kind, spec = info(node).type, info(node).spec
    if isinstance(kind, tuple):
        assert isinstance(spec, tuple)
        return [k for k, s in zip(kind, spec, strict=True) if s is not None]
    return [] if kind is None else [kind]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(info(node).spec, TensorSpec)


def holds_tensors(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) or (spec is not None and any(s is not None for s in spec))


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


_NEW = {"whole_call": None, "replay": False, "region": None, "held": ()}


def derive(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    origin: str,
    name: str | None = None,
    **changes: Any,
) -> fx.Node:
    """A new call node at the graph's insertion point, with the provenance of ``like``."""
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    set_info(node, replace(info(like), **{**_NEW, "origin": origin, **changes}))
    return node


def take_place(value: fx.Node, node: fx.Node) -> None:
    """Let ``value`` stand wherever ``node`` did, under its name, and erase ``node``."""
    for user in node.users:
        call = info(user).whole_call
        if call is not None:
            annotate(user, whole_call=fx.node.map_arg(call, lambda n: value if n is node else n))
    name = node.name
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
    value.name = name


@dataclass(frozen=True, slots=True)
class State:
    """A parameter, buffer or constant. ``names`` are all names of the one tensor (ties)."""

    kind: Literal["parameter", "buffer", "constant"]
    spec: TensorSpec
    names: tuple[str, ...]
    persistent: bool = True
    type: Type = I


@dataclass(frozen=True, slots=True)
class Program:
    """See the module's docstring.

    ``state`` maps each canonical name to its :class:`State`. ``constants`` holds the tensors of
    kind "constant". ``blocks`` maps a block's name to its graph and ``calls`` each called module
    path to a block's name. ``placeholders`` gives, for each placeholder of the root, the index
    of its leaf among the flattened arguments. ``mutations`` are the buffers that the last
    outputs are written to. ``ranks`` is the size of the tensor-parallel mesh dimension.
    ``form`` tells what the graphs compute on. ``report`` is what passes have to say of their
    work; it changes no result.
    """

    graph: fx.Graph
    state: Mapping[str, State]
    constants: Mapping[str, Tensor]
    in_spec: TreeSpec
    out_spec: TreeSpec
    placeholders: tuple[int, ...]
    mutations: tuple[str, ...] = ()
    blocks: Mapping[str, fx.Graph] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    form: Form = "whole"
    report: Mapping[str, Any] = field(default_factory=dict)

    def graphs(self) -> Iterator[tuple[str, fx.Graph]]:
        """The blocks, then the root (named ``""``)."""
        yield from self.blocks.items()
        yield "", self.graph

    def call_nodes(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_module"]

    def call_count(self, block: str) -> int:
        """How often the root runs ``block`` (the root itself, ``""``, runs once)."""
        if not block:
            return 1
        return sum(self.calls[str(n.target)] == block for n in self.call_nodes())

    def state_names(self, block: str, node: fx.Node) -> list[str]:
        """The canonical names that a ``get_attr`` node reads, one per call of its block."""
        if not block:
            return [self.canonical(str(node.target))]
        paths = [path for path, name in self.calls.items() if name == block]
        return [self.canonical(f"{path}.{node.target}") for path in paths]

    def state_name(self, block: str, node: fx.Node) -> str:
        """The first of :meth:`state_names`."""
        path = next((p for p, b in self.calls.items() if b == block), "") if block else ""
        return self.canonical(f"{path}.{node.target}" if path else str(node.target))

    def canonical(self, name: str) -> str:
        if name in self.state:
            return name
        return next(c for c, s in self.state.items() if name in s.names)

    def with_graphs(self, graphs: Mapping[str, fx.Graph], **changes: Any) -> Program:
        """The program with the given graphs (``""`` is the root) in place of its own."""
        blocks = {name: graphs.get(name, graph) for name, graph in self.blocks.items()}
        return replace(self, graph=graphs.get("", self.graph), blocks=blocks, **changes)


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same names and information, and the map from old to new nodes."""
    new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = new.node_copy(node, nodes.__getitem__)
        nodes[node].name = node.name
        known = node.meta.get(_SLOT)
        if isinstance(known, Info) and known.whole_call is not None:
            call = fx.node.map_arg(known.whole_call, nodes.__getitem__)
            set_info(nodes[node], replace(known, whole_call=call))
    return new, nodes


def copy_program(program: Program) -> Program:
    return program.with_graphs({name: copy_graph(graph)[0] for name, graph in program.graphs()})


def output_node(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return found


def outputs(graph: fx.Graph) -> list[Any]:
    """The flat outputs: nodes, or Python constants."""
    values = output_node(graph).args[0]
    return list(values) if isinstance(values, (tuple, list)) else [values]


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing after it reads."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in node.all_input_nodes:
            if value not in seen and value.op != "get_attr":
                seen.add(value)
                if node.op != "output":
                    found.setdefault(node, []).append(value)
        if node not in seen and node.op in ("call_function", "call_module"):
            found.setdefault(node, []).append(node)
    return found


def region_results(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of a region whose values are used outside of it."""
    inside = set(nodes)
    return [n for n in nodes if any(user not in inside for user in n.users)]


def region_again(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a region that run again, and those that give them values that are held."""
    again = [n for n in nodes if info(n).replay and not _is_held_part(n)]
    read = dict.fromkeys(value for node in again for value in node.all_input_nodes)
    return again, [n for n in nodes if n in read and n not in again]


def _is_held_part(node: fx.Node) -> bool:
    return is_getitem(node) and info(node.all_input_nodes[0]).held


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def flat_nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [v for v in values if isinstance(v, fx.Node)]


def program_hash(program: Program) -> str:
    """A hash of everything that ranks must agree on: ops, arguments, types, order, state."""
    digest = hashlib.sha256(f"{program.ranks} {program.form}".encode())
    for name, graph in program.graphs():
        digest.update(f"graph {name}".encode())
        for node in graph.nodes:
            row = f"{node.op} {node.target} {node.args} {node.kwargs} {info(node).type}"
            again = info(node).replay, info(node).region, info(node).held
            digest.update(f"{row} {again}".encode())
    for name, state in program.state.items():
        digest.update(f"{name} {state.names} {state.kind} {state.spec} {state.type}".encode())
    for name, value in program.constants.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        if value.device.type != "meta":
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
    digest.update(repr((sorted(program.calls.items()), program.mutations)).encode())
    return digest.hexdigest()
