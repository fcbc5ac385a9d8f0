"""An independent oracle: rewritten programs pass the checker of the ``spmd_types`` package.

One rank's program runs on a fake process group, each conversion replaced by that of
``spmd_types``, under its type checker. Their types per mesh dimension are ours but for one:
Varying stands for every Shard. Every value must get the type that ours has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
from spmd_types._checker import _OP_REGISTRY
from spmd_types._testing import fake_pg
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from graphpar.errors import InternalError
from graphpar.ops import is_conversion, signature
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import (
    Program,
    TensorSpec,
    info,
    is_getitem,
    output_node,
    placeholders,
    tensor_spec,
)
from graphpar.trace import bind, trace
from graphpar.types import I, P, R, Shard, Type, cut, local_shape
from graphpar.verify import verify
from tests import zoo
from tests.unit import mutations

aten = torch.ops.aten
TP = "tp"

# In their local mode a product or sum over shards is Varying, until the program says that it is
# Partial.
_CONTRACTIONS = {
    aten.linear.default,
    aten.mm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.einsum.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.cross_entropy_loss.default,
}


def kind_of(node: fx.Node) -> Any:
    return info(node).type


def theirs(kind: Type) -> Any:
    return {I: spmd.I, R: spmd.R, P: spmd.P}.get(kind, spmd.V)


class Checked:
    """One rank's program under their checker."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.state = {name: self._state(name) for name in program.state}
        self.inputs = [self._made(tensor_spec(n), kind_of(n)) for n in placeholders(program.graph)]
        self.compared = 0

    def _state(self, name: str) -> Tensor:
        known, ranks = self.program.state[name], self.program.ranks
        if known.kind != "constant":
            return self._made(known.spec, known.type)
        whole, kind = self.program.constants[name], known.type
        return (cut(whole, kind, 0, ranks) if isinstance(kind, Shard) else whole).detach().clone()

    def _made(self, spec: TensorSpec, kind: Type) -> Tensor:
        shape = local_shape(spec.shape, kind, self.program.ranks)
        value = torch.full(shape, 0.5 if spec.dtype.is_floating_point else 1, dtype=spec.dtype)
        return value.requires_grad_(spec.differentiable)

    def run(self) -> list[Any]:
        """The root's outputs; parameters and inputs are asserted to have their types."""
        for name, value in self.state.items():
            spmd.assert_type(value, {TP: theirs(self.program.state[name].type)})
        for node, value in zip(placeholders(self.program.graph), self.inputs, strict=True):
            spmd.assert_type(value, {TP: theirs(kind_of(node))})
        return self._graph(self.program.graph, self.inputs, "")

    def _graph(self, graph: fx.Graph, inputs: list[Any], prefix: str) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(placeholders(graph), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "get_attr":
                env[node] = self.state[self.program.canonical(f"{prefix}{node.target}")]
            elif node.op == "call_module":
                block = self.program.blocks[self.program.calls[str(node.target)]]
                env[node] = self._graph(block, [env[a] for a in node.args], f"{node.target}.")
            elif node.op == "call_function":
                env[node] = self._op(node, env)
            if isinstance(info(node).spec, TensorSpec):
                self._compare(node, env[node], info(node).type)
        values: Any = output_node(graph).args[0]
        return [env[v] if isinstance(v, fx.Node) else v for v in values]

    def _compare(self, node: fx.Node, value: Tensor, kind: Any) -> None:
        """Their type is ours; a new constant is what we say, as it is the same on every rank."""
        spmd.assert_type(value, {TP: theirs(kind)})
        shape = local_shape(tensor_spec(node).shape, kind, self.program.ranks)
        assert tuple(value.shape) == shape, node
        self.compared += 1

    def _op(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if is_getitem(node):
            return args[0][args[1]]
        if is_conversion(node.target):
            return self._conversion(*signature(node.target, args[1:]), args[0])  # type: ignore[arg-type]
        if node.target is torch.ops.graphpar.dropout.default:
            return aten.dropout.default(*args[:3])
        value = registered(node.target)(*args, **kwargs)
        kind = info(node).type
        if kind == P and node.target in _CONTRACTIONS and self._type(value) is spmd.V:
            value = spmd.reinterpret(value, TP, src=spmd.V, dst=spmd.P)
        return value

    def _type(self, value: Tensor) -> Any:
        return spmd.maybe_get_axis_local_type(value, TP)

    def _conversion(self, source: Type, target: Type, value: Tensor) -> Tensor:
        """Blocks are the order of elements, which no type here sees: one block stands for all."""
        src, dst = (
            spmd.S(kind.dim) if isinstance(kind, Shard) else theirs(kind)
            for kind in (source, target)
        )
        pair = type(source), type(target)
        value = value.contiguous()
        if source == P and isinstance(target, Shard):
            return spmd.reduce_scatter(value, TP, src=src, dst=dst)
        if source == P:
            return spmd.all_reduce(value, TP, src=src, dst=dst)
        if pair == (Shard, Shard):
            return spmd.all_to_all(value, TP, src=src, dst=dst)
        if isinstance(source, Shard) and target != P:
            return spmd.all_gather(value, TP, src=src, dst=dst)
        return spmd.convert(value, TP, src=src, dst=dst, expert_mode=target == P)


def registered(target: Any) -> Callable[..., Any]:
    """The public function for the op that their table of linear ops has; else the op."""
    name = target._schema.name.removeprefix("aten::")
    for owner in (torch, torch.Tensor):
        function = getattr(owner, name, None)
        if function in _OP_REGISTRY:
            return function
    return target


def check(program: Program) -> int:
    """Run the program under their checker; how many values have been compared."""
    checked = Checked(program)
    with fake_pg(program.ranks):
        mesh = init_device_mesh("cpu", (program.ranks,), mesh_dim_names=(TP,))
        with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck():
            checked.run()
    return checked.compared
