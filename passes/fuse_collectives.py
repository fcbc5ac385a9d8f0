"""fuse_collectives: collectives and the products beside them as one op, which overlaps them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.ops import is_conversion, signature
from graphpar.program import (
    MESH_DIM,
    Program,
    TensorSpec,
    copy_graph,
    derive,
    one_type,
    take_place,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard, layout_arguments

NAME = "fuse-collectives"
aten = torch.ops.aten
_ops = torch.ops.graphpar
_NO_AXES: dict[str, Any] = {"dims": None, "axes": None, "operands": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseCollectives:
    """``small_bytes``: gradients of parameters up to this size share an all-reduce."""

    small_bytes: int = 1 << 20


def fuse_collectives(program: Program, options: FuseCollectives = FuseCollectives()) -> Program:
    """Fuse the products that share a converted operand with its conversion, products before a
    reduce-scatter with it, and the conversions of small parameters with each other.

    Autograd then keeps the shard of what is gathered for products, and backward overlaps
    collectives with products (:mod:`graphpar.ops.fused`). Needs: a local program without regions.
    Ensures: the same types. Numerics: reassociates (sums of gradients).
    """
    graphs = {}
    for name, graph in program.graphs():
        graphs[name], _ = copy_graph(graph)
        for node in list(graphs[name].nodes):
            if node.op == "call_function" and is_conversion(node.target):
                _fuse(graphs[name], node)
        _fuse_parameters(graphs[name], options.small_bytes)
    return program.with_graphs(graphs)


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    source, target = signature(node.target, node.args[1:])  # type: ignore[arg-type]
    if target == R and (isinstance(source, Shard) or source == I):
        _fuse_products(graph, node, source)
    elif source == P and isinstance(target, Shard):
        _fuse_product(graph, node, target)


# --- products of one converted operand ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Product:
    """``node`` is ``aten.linear`` of ``x`` but for the weight, which may lie [k, n] here."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def _product(node: fx.Node) -> _Product | None:
    """The node as a product of real numbers with a matrix; ``None`` if it is no such product."""
    if node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    args: Any = node.args
    found: _Product | None = None
    if node.target is aten.linear.default:
        found = _Product(node, args[0], args[1], args[2] if len(args) == 3 else None, False)
    elif node.target in (aten.mm.default, aten.matmul.default):
        found = _Product(node, args[0], args[1], None, True)
    elif node.target is aten.addmm.default:
        found = _Product(node, args[1], args[2], args[0], True)
    if found is None or len(tensor_spec(found.weight).shape) != 2:
        return None
    spec = tensor_spec(node)
    if not spec.dtype.is_floating_point:
        return None
    if found.bias is not None and tensor_spec(found.bias).shape != spec.shape[-1:]:
        return None
    return found if len(tensor_spec(found.x).shape) > 1 else None


def _fuse_products(graph: fx.Graph, node: fx.Node, source: Any) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    found = [_product(user) for user in _in_order(graph, node)]
    products = [p for p in found if p is not None]
    if not products or len(products) < len(found) or (source == I and x.op == "get_attr"):
        return
    if any(p.x is not node or node in (p.weight, p.bias) for p in products):
        return
    if not any(tensor_spec(p.node).differentiable for p in products):
        return
    first = products[0].node
    if not all(_bring_before(graph, first, _others(p)) for p in products):
        return
    with graph.inserting_before(first):
        weights = [_as_linear(graph, p) for p in products]
        biases = [p.bias for p in products]
        op = _ops.convert_linear if source == I else _ops.gather_linear
        layout = (MESH_DIM,) if source == I else layout_arguments(source, MESH_DIM)
        args = (x, weights, biases if any(b is not None for b in biases) else [], *layout)
        fused = _of_several(graph, op.default, args, [p.node for p in products], f"{x.name}_linear")
    _items(graph, fused, [p.node for p in products])
    graph.erase_node(node)


def _in_order(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    return [n for n in graph.nodes if n in node.users]


def _others(product: _Product) -> list[fx.Node]:
    return [n for n in (product.weight, product.bias) if n is not None]


def _bring_before(graph: fx.Graph, place: fx.Node, values: Sequence[fx.Node]) -> bool:
    """Whether the values are there before ``place``, or can be: what state alone makes of them
    moves."""
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node is place:
            break
        before.add(node)
    late: dict[fx.Node, None] = {}

    def collect(value: fx.Node) -> bool:
        if value in before or value in late:
            return True
        if not _of_state(value):
            return False
        for each in value.all_input_nodes:
            collect(each)
        late[value] = None
        return True

    if not all(map(collect, values)):
        return False
    for value in late:
        place.prepend(value)
    return True


def _of_state(node: fx.Node) -> bool:
    """Whether a value is made of state alone, and of nothing random."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not random and all(map(_of_state, node.all_input_nodes))


def _as_linear(graph: fx.Graph, product: _Product) -> fx.Node:
    """The weight [n, k]."""
    weight = product.weight
    if not product.transposed:
        return weight
    spec, kind = tensor_spec(weight), one_type(weight)
    flipped = TensorSpec(spec.shape[::-1], spec.dtype, spec.device, spec.differentiable)
    if isinstance(kind, Shard):
        kind = Shard(1 - kind.dim, kind.blocks, kind.units, axis=kind.axis)
    return derive(
        graph,
        aten.t.default,
        (weight,),
        like=product.node,
        origin=NAME,
        name=f"{weight.name}_t",
        spec=flipped,
        type=kind,
        **_NO_AXES,
    )


def _of_several(
    graph: fx.Graph, op: Any, args: tuple[Any, ...], nodes: Sequence[fx.Node], name: str
) -> fx.Node:
    """An op that gives what each of ``nodes`` gives."""
    return derive(
        graph,
        op,
        args,
        like=nodes[0],
        origin=NAME,
        name=name,
        spec=tuple(tensor_spec(n) for n in nodes),
        type=tuple(one_type(n) for n in nodes),
        **_NO_AXES,
    )


def _items(graph: fx.Graph, fused: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Put the results of ``fused`` in the places of ``nodes``."""
    place = fused
    for i, node in enumerate(nodes):
        with graph.inserting_after(place):
            item = derive(graph, operator.getitem, (fused, i), like=node, origin=NAME, **_NO_AXES)
        take_place(item, node)
        place = item


# --- a product before a reduce-scatter ------------------------------------------------------------


def _fuse_product(graph: fx.Graph, node: fx.Node, target: Shard) -> None:
    value = node.args[0]
    assert isinstance(value, fx.Node)
    product = _product(value)
    if product is None or product.bias is not None or len(value.users) > 1:
        return
    last, bias = _added_bias(node)
    if not tensor_spec(last).differentiable:
        return
    with graph.inserting_before(last):
        weight = _as_linear(graph, product)
        args = (product.x, weight, bias, *layout_arguments(target, MESH_DIM))
        fused = derive(graph, _ops.linear_scatter.default, args, like=last, origin=NAME, **_NO_AXES)
    take_place(fused, last)
    for each in (node, value) if last is not node else (value,):
        graph.erase_node(each)


def _added_bias(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The sum of ``node`` with a bias that nothing else stands before, and the bias; else the
    node itself."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is aten.add.Tensor and not users[0].kwargs:
        first, bias = users[0].args
        if first is node and isinstance(bias, fx.Node) and bias is not node:
            spec = tensor_spec(bias)
            same = spec.dtype == tensor_spec(node).dtype
            if len(spec.shape) == 1 and spec.shape[0] == tensor_spec(node).shape[-1] and same:
                return (users[0], bias) if one_type(bias) == R else (node, None)
    return node, None


# --- parameters -----------------------------------------------------------------------------------


def _fuse_parameters(graph: fx.Graph, small_bytes: int) -> None:
    """One conversion for the small parameters of a graph.

    Not for those of all blocks, in the root: wrappers such as FSDP2 have a block's parameters while
    it runs alone, and take its gradients, summed, when its backward is done.
    """

    def is_small(node: fx.Node) -> bool:
        value: Any = node.args[0] if node.target is _ops.convert.default else None
        if value is None or value.op != "get_attr":
            return False
        return tensor_spec(value).differentiable and tensor_spec(value).nbytes <= small_bytes

    found = [node for node in graph.nodes if node.op == "call_function" and is_small(node)]
    if len(found) < 2:
        return
    values: list[Any] = [node.args[0] for node in found]
    _bring_before(graph, found[0], values)
    with graph.inserting_before(found[0]):
        args = (values, MESH_DIM)
        fused = _of_several(graph, _ops.convert_many.default, args, found, "parameters")
    _items(graph, fused, found)
