"""localize: turn ops on whole tensors into ops on one rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.passes.rules import local_call, summed_size, tensor_arguments
from graphpar.program import (
    MESH_DIM,
    Program,
    annotate,
    copy_graph,
    derive,
    info,
    is_getitem,
    result_types,
)
from graphpar.types import P, Shard, layout_arguments

NAME = "localize"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Localize:
    pass


def localize(program: Program, options: Localize = Localize()) -> Program:
    """Rewrite size arguments to local sizes, means over sharded axes to sums, dropout of shards to
    one that draws the whole tensor's mask, and lookups and losses along a sharded axis to their
    forms on shards.

    Needs: types that agree. Ensures: every rank can run the graphs on its parts; the form is
    "local". Numerics: reassociates.
    """
    graphs = {}
    for name, graph in program.graphs():
        graphs[name], _ = copy_graph(graph)
        for node in list(graphs[name].nodes):
            if node.op == "call_function" and not is_getitem(node):
                _localize(graphs[name], node, program.ranks)
    return program.with_graphs(graphs, form="local")


def _localize(graph: fx.Graph, node: fx.Node, ranks: int) -> None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target.namespace != "aten":
        return
    operands: list[Any] = [info(n).type for n in tensor_arguments(node)]
    if target is aten.dropout.default and isinstance(operands[0], Shard):
        kind = operands[0]
        x, p, train = node.args
        args = (x, p, train, *layout_arguments(kind, MESH_DIM))
        with graph.inserting_before(node):
            value = derive(graph, torch.ops.graphpar.dropout.default, args, like=node, origin=NAME)
        _take_place(graph, node, value)
        return
    if target is aten.dropout.default:
        _make_contiguous(graph, node)
        return
    axes = info(node).axes
    if axes is not None and axes.average and info(node).type == P and P not in operands:
        SUMS[target](graph, node)
        return
    form, args, kwargs = local_call(node, operands, result_types(node), ranks)
    if (form, args, kwargs) != (target, tuple(node.args), dict(node.kwargs)):
        annotate(node, whole_call=(tuple(node.args), dict(node.kwargs)))
        node.target, node.args, node.kwargs = form, args, kwargs


def _make_contiguous(graph: fx.Graph, node: fx.Node) -> None:
    """The mask is drawn in the order of the memory, which conversions may have changed."""
    x = tensor_arguments(node)[0]
    if x.target is not aten.contiguous.default:
        with graph.inserting_before(node):
            value = derive(graph, aten.contiguous.default, (x,), like=x, origin=NAME)
        node.replace_input_with(x, value)


def _take_place(graph: fx.Graph, node: fx.Node, value: fx.Node) -> None:
    name = node.name
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    value.name = name


def _divided(graph: fx.Graph, node: fx.Node, total: fx.Node) -> None:
    count = summed_size(node)
    _take_place(graph, node, derive(graph, aten.div.Tensor, (total, count), like=node, origin=NAME))


def _sum_of_mean(target: Any) -> Callable[[fx.Graph, fx.Node], None]:
    def rewrite(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_before(node):
            total = derive(graph, target, node.args, node.kwargs, like=node, origin=NAME)
            _divided(graph, node, total)

    return rewrite


def _sum_of_loss(graph: fx.Graph, node: fx.Node) -> None:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    place = next(i for i, a in enumerate(schema) if a.name == "reduction")
    args = list(node.args)
    args += [a.default_value for a in schema[len(args) : place + 1]]
    args[place] = 2
    with graph.inserting_before(node):
        total = derive(graph, node.target, tuple(args), node.kwargs, like=node, origin=NAME)
        _divided(graph, node, total)


SUMS: dict[Any, Callable[[fx.Graph, fx.Node], None]] = {
    aten.mean.dim: _sum_of_mean(aten.sum.dim_IntList),
    aten.mean.default: _sum_of_mean(aten.sum.default),
    aten.cross_entropy_loss.default: _sum_of_loss,
    aten.mse_loss.default: _sum_of_loss,
    aten.l1_loss.default: _sum_of_loss,
    aten.smooth_l1_loss.default: _sum_of_loss,
    aten.huber_loss.default: _sum_of_loss,
    aten.binary_cross_entropy.default: _sum_of_loss,
    aten.binary_cross_entropy_with_logits.default: _sum_of_loss,
    aten.soft_margin_loss.default: _sum_of_loss,
}
