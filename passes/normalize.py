"""normalize: rewrite ops into the forms that the partitioner reasons about."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphpar.cost import is_contraction
from graphpar.program import Program, TensorSpec, copy_graph, derive, is_tensor, tensor_spec

NAME = "normalize"
aten = torch.ops.aten
CONVOLUTIONS = frozenset(
    (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize:
    pass


def normalize(program: Program, options: Normalize = Normalize()) -> Program:
    """Split biases from products, group sums, take attention with dropout apart.

    Needs: traced or outlined graphs. Ensures: a product that may become Partial carries no bias,
    addends that may be Partial are added first, so that one reduction serves them, and dropout
    stands alone. Numerics: reassociates.
    """
    graphs = {}
    for name, graph in program.graphs():
        new, _ = copy_graph(graph)
        for node in list(new.nodes):
            rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
            if rewrite is not None:
                rewrite(new, node)
        _group_sums(new)
        graphs[name] = new
    return program.with_graphs(graphs)


def _replace(graph: fx.Graph, node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _split_linear(graph: fx.Graph, node: fx.Node) -> None:
    if len(node.args) < 3 or node.args[2] is None:
        return
    x, weight, bias = node.args
    _add_bias(graph, node, (node.target, (x, weight)), bias)


def _split_addmm(graph: fx.Graph, node: fx.Node) -> None:
    bias, x, weight = node.args
    if set(node.kwargs.values()) - {1}:
        return
    _add_bias(graph, node, (aten.mm.default, (x, weight)), bias)


def _split_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """The bias is added along the channels."""
    if len(node.args) < 3 or node.args[2] is None:
        return
    x, weight, bias, *rest = node.args
    assert isinstance(bias, fx.Node)
    assert isinstance(weight, fx.Node)
    (channels,), spatial = _size(bias), len(_size(weight)) - 2
    with graph.inserting_before(node):
        column = derive(
            graph,
            aten.view.default,
            (bias, [channels] + [1] * spatial),
            like=node,
            origin=NAME,
            name=f"{node.name}_column",
            spec=replace(tensor_spec(bias), shape=(channels,) + (1,) * spatial),
        )
    _add_bias(graph, node, (node.target, (x, weight, None, *rest)), column)


def _add_bias(graph: fx.Graph, node: fx.Node, product: tuple[Any, Any], bias: Any) -> None:
    with graph.inserting_before(node):
        value = derive(graph, *product, like=node, origin=NAME)
        total = derive(
            graph, aten.add.Tensor, (value, bias), like=node, origin=NAME, name=f"{node.name}_bias"
        )
    name = node.name
    _replace(graph, node, total)
    value.name = name


def _type_as(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        args = (node.args[0], tensor_spec(node).dtype)
        value = derive(graph, aten.to.dtype, args, like=node, origin=NAME)
    _replace(graph, node, value)


def _squeeze(graph: fx.Graph, node: fx.Node) -> None:
    """Say which dimensions go: a rank's part may have more of size 1."""
    x, *given = node.args
    assert isinstance(x, fx.Node)
    shape = _size(x)
    dims = [d % max(len(shape), 1) for d in given if isinstance(d, int)]
    ones = [d for d in (dims if given else range(len(shape))) if shape and shape[d] == 1]
    with graph.inserting_before(node):
        value = derive(graph, aten.squeeze.dims, (x, ones), like=node, origin=NAME)
    _replace(graph, node, value)


def _cat(graph: fx.Graph, node: fx.Node) -> None:
    """Without operands that have no elements: an op on those has no axes to reason about."""
    tensors: Any = node.args[0]
    kept = [x for x in tensors if tensor_spec(x).numel]
    if not kept or len(kept) == len(tensors):
        return
    if any(tensor_spec(x).dtype != tensor_spec(node).dtype for x in kept):
        return
    with graph.inserting_before(node):
        args = (kept, *node.args[1:])
        value = derive(graph, node.target, args, node.kwargs, like=node, origin=NAME)
    _replace(graph, node, value)
    for x in dict.fromkeys(tensors):
        _erase_unused(graph, x)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    if node.op == "call_function" and not node.users:
        operands = node.all_input_nodes
        graph.erase_node(node)
        for operand in operands:
            _erase_unused(graph, operand)


def _created(make: Callable[[fx.Node], tuple[Any, tuple[Any, ...]]]) -> Any:
    def rewrite(graph: fx.Graph, node: fx.Node) -> None:
        spec = tensor_spec(node)
        target, args = make(node)
        kwargs = {"dtype": spec.dtype, "device": spec.device}
        with graph.inserting_before(node):
            value = derive(graph, target, args, kwargs, like=node, origin=NAME)
        _replace(graph, node, value)

    return rewrite


def attention_with_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Attention whose probabilities are dropped out, as products, softmax and dropout.

    The formula is that of torch's own math implementation, which runs in this case.
    """
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    named = {a.name: a.default_value for a in schema} | dict(
        zip([a.name for a in schema], node.args, strict=False)
    )
    named |= node.kwargs
    if not named["dropout_p"]:
        return
    q, k, v = named["query"], named["key"], named["value"]
    shape, key_shape = tensor_spec(q).shape, tensor_spec(k).shape
    dtype, device = tensor_spec(q).dtype, tensor_spec(q).device
    scale = named["scale"] if named["scale"] is not None else 1 / math.sqrt(shape[-1])

    def emit(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], **spec: Any) -> fx.Node:
        kwargs = spec.pop("kwargs", None)
        whole = replace(tensor_spec(node), shape=shape, **spec)
        return derive(graph, target, args, kwargs, like=node, origin=NAME, spec=whole)

    with graph.inserting_before(node):
        if named["enable_gqa"] and shape[-3] != key_shape[-3]:
            group = shape[-3] // key_shape[-3]
            k, v = (
                emit(aten.repeat_interleave.self_int, (t, group, -3), _with(t, -3, shape[-3]))
                for t in (k, v)
            )
            key_shape = tensor_spec(k).shape
        side = math.sqrt(scale)
        q = emit(aten.mul.Tensor, (q, side), shape)
        k = emit(aten.transpose.int, (k, -2, -1), (*key_shape[:-2], key_shape[-1], key_shape[-2]))
        k = emit(aten.mul.Tensor, (k, side), tensor_spec(k).shape)
        scores_shape = (*tensor_spec(node).shape[:-1], key_shape[-2])
        scores = emit(aten.matmul.default, (q, k), scores_shape)
        mask = named["attn_mask"]
        if named["is_causal"]:
            square = scores_shape[-2:]
            boolean = {"dtype": torch.bool, "differentiable": False}
            placed = {"dtype": torch.bool, "device": device}
            mask = emit(aten.ones.default, (list(square),), square, kwargs=placed, **boolean)
            mask = emit(aten.tril.default, (mask,), square, **boolean)
        if mask is not None and tensor_spec(mask).dtype == torch.bool:
            away = replace(tensor_spec(mask), dtype=torch.bool)
            hidden = derive(
                graph, aten.logical_not.default, (mask,), like=node, origin=NAME, spec=away
            )
            scores = emit(aten.masked_fill.Scalar, (scores, hidden, -math.inf), scores_shape)
        elif mask is not None:
            scores = emit(aten.add.Tensor, (scores, mask), scores_shape)
        weights = emit(aten.softmax.int, (scores, -1), scores_shape)
        dropped = emit(aten.dropout.default, (weights, named["dropout_p"], True), scores_shape)
        value = emit(aten.matmul.default, (dropped, v), tensor_spec(node).shape, dtype=dtype)
    _replace(graph, node, value)


def _with(node: fx.Node, dim: int, size: int) -> tuple[int, ...]:
    shape = list(tensor_spec(node).shape)
    shape[dim] = size
    return tuple(shape)


def _size(node: fx.Node) -> list[int]:
    return list(tensor_spec(node).shape)


_REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], None]] = {
    aten.linear.default: _split_linear,
    aten.addmm.default: _split_addmm,
    **dict.fromkeys(CONVOLUTIONS, _split_convolution),
    aten.cat.default: _cat,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.type_as.default: _type_as,
    aten.to.other: _type_as,
    aten.new_zeros.default: _created(lambda n: (aten.zeros.default, (_size(n),))),
    aten.new_ones.default: _created(lambda n: (aten.ones.default, (_size(n),))),
    aten.new_full.default: _created(lambda n: (aten.full.default, (_size(n), n.args[2]))),
    aten.scaled_dot_product_attention.default: attention_with_dropout,
}


# --- sums ---------------------------------------------------------------------------------------

_PASSING = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.to.dtype,
    aten.contiguous.default,
    aten.clone.default,
}


def _plain_add(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs


def _terms(node: Any, root: TensorSpec) -> list[Any]:
    """The addends of a tree of additions whose inner sums have no other use."""
    if isinstance(node, fx.Node) and _plain_add(node) and is_tensor(node):
        uses = sum(list(user.args).count(node) for user in node.users)
        if tensor_spec(node) == root and len(node.users) == uses == 1:
            return [t for argument in node.args for t in _terms(argument, root)]
    return [node]


def _may_be_partial(node: Any) -> bool:
    while isinstance(node, fx.Node) and node.target in _PASSING:
        node = node.args[0]
    return isinstance(node, fx.Node) and is_contraction(node.target)


def _group_sums(graph: fx.Graph) -> None:
    """Where a sum has two addends or more that may be Partial, add those first."""
    absorbed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in absorbed or not (_plain_add(node) and is_tensor(node)):
            continue
        spec = tensor_spec(node)
        terms = [t for argument in node.args for t in _terms(argument, spec)]
        partial = [t for t in terms if _may_be_partial(t)]
        if len(partial) < 2 or any(not isinstance(t, fx.Node) for t in terms):
            continue
        if any(tensor_spec(t).shape != spec.shape for t in partial):
            continue
        inner = _inner_sums(node, spec)
        absorbed.update(inner)
        rest = [t for t in terms if t not in partial]
        with graph.inserting_before(node):
            total = partial[0]
            for term in [*partial[1:], *rest]:
                total = derive(graph, aten.add.Tensor, (total, term), like=node, origin=NAME)
        node.replace_all_uses_with(total)
        for dead in [node, *inner]:
            graph.erase_node(dead)


def _inner_sums(node: fx.Node, root: TensorSpec) -> list[fx.Node]:
    """The sums below ``node`` that :func:`_terms` looks through, users before operands."""
    found: list[fx.Node] = []
    for argument in node.args:
        if _terms(argument, root) != [argument]:
            assert isinstance(argument, fx.Node)
            found += [argument, *_inner_sums(argument, root)]
    return found
