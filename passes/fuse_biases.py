"""fuse_biases: put biases back into the products that normalize took them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.passes import normalize
from graphpar.program import Program, copy_graph, derive, info, tensor_spec
from graphpar.types import P

NAME = "fuse-biases"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseBiases:
    pass


def fuse_biases(program: Program, options: FuseBiases = FuseBiases()) -> Program:
    """Fuse ``x W + b`` where no conversion stands between the product and the sum, and
    convolutions with their biases likewise.

    Needs: conversions inserted. Ensures: the same types. Numerics: reassociates.
    """
    graphs = {}
    for name, graph in program.graphs():
        graphs[name], _ = copy_graph(graph)
        for node in list(graphs[name].nodes):
            if node.target is aten.add.Tensor and info(node).origin == normalize.NAME:
                _fuse(graphs[name], node)
    return program.with_graphs(graphs)


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    product, bias = node.args
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node):
        return
    convolution, added = product.target in normalize.CONVOLUTIONS, bias
    if convolution and bias.target is aten.view.default and info(bias).origin == normalize.NAME:
        bias = bias.all_input_nodes[0]
    if len(product.users) > 1 or info(product).type == P or len(tensor_spec(bias).shape) != 1:
        return
    target, args = product.target, product.args
    kinds: tuple[Any, ...] = (info(bias).type,)
    operands = info(product).operands or ()
    if convolution:
        args, kinds = (*args[:2], bias, *args[3:]), (*operands, *kinds)
    elif target is aten.linear.default and len(args) == 2:
        args, kinds = (*args, bias), (*operands, *kinds)
    elif target is aten.mm.default:
        target, args, kinds = aten.addmm.default, (bias, *args), (*kinds, *operands)
    else:
        return
    with graph.inserting_before(node):
        value = derive(
            graph,
            target,
            args,
            like=product,
            origin=normalize.NAME,
            type=info(node).type,
            axes=None,
            operands=kinds,
            name=product.name,
        )
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    graph.erase_node(product)
    if added is not bias and not added.users:
        graph.erase_node(added)
