"""New nodes of the pass, with the specs that their ops give."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar.program import derive, info, spec_of, tensor_spec

NAME = "lower-recurrences"
aten = torch.ops.aten


class Emitter:
    """Adds nodes at the insertion point of ``graph``, with the provenance of ``like``.

    ``strict``: recurrences for which no kernel of a GPU can be had are errors. ``made``: what was
    added, in order. ``ops``: the recurrences among it.
    """

    def __init__(self, graph: fx.Graph, like: fx.Node, *, strict: bool = False) -> None:
        self.graph, self.like, self.strict = graph, like, strict
        self.made: list[fx.Node] = []
        self.ops: list[fx.Node] = []

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        spec, name = _result(target, args), target.__name__.split(".")[0]
        node = derive(self.graph, target, args, like=self.like, origin=NAME, spec=spec, name=name)
        self.made.append(node)
        return node

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self(operator.getitem, value, index)

    def sparse(
        self,
        gates: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        projection: fx.Node | None,
        states: list[fx.Node],
        cell: str,
        reverse: bool,
    ) -> list[fx.Node]:
        """The op ``sparse_rnn``: the states, the last one, and of an LSTM the last cell state."""
        op = torch.ops.graphpar_rnn.sparse_rnn.default
        c = states[1] if len(states) > 1 else None
        strict = (True,) if self.strict and tensor_spec(gates).device.type != "cpu" else ()
        value = self(op, gates, weight, bias, projection, states[0], c, cell, reverse, *strict)
        self.ops.append(value)
        return [self.item(value, i) for i in range(len(states) + 1)]

    def discard(self) -> None:
        """Erase what was added and is not used."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)


def _result(target: Any, args: tuple[Any, ...]) -> Any:
    """The spec of what an op gives on tensors of its arguments' specs."""
    if target is operator.getitem:
        return info(args[0]).spec[args[1]]  # type: ignore[index]

    def tensor(node: fx.Node) -> Tensor:
        spec = tensor_spec(node)
        return torch.empty(
            spec.shape, dtype=spec.dtype, device=spec.device, requires_grad=spec.differentiable
        )

    with FakeTensorMode(), torch.enable_grad():
        found = target(*fx.node.map_arg(args, tensor))
    if isinstance(found, Tensor):
        return spec_of(found, differentiable=found.requires_grad)
    return tuple(spec_of(v, differentiable=v.requires_grad) for v in found)
