"""The graph under construction: nodes with their fake values, sources and gradient flags."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar.provenance import UNKNOWN, Source

aten = torch.ops.aten
Fake = Any
"""A node's fake value: a tensor, or a sequence of tensors."""
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An op, its positional and its keyword arguments."""


@dataclass(slots=True)
class Fact:
    """What is known of a node: fake value, source, and whether it carries a gradient.

    ``grad`` is one flag, or one for each output.
    """

    val: Fake
    source: Source
    grad: bool | tuple[bool, ...] = False


@cache
def op_name(target: Any) -> str:
    """``add`` of ``aten.add_.Tensor``; empty if ``target`` is no op."""
    return target._schema.name.split("::")[-1].strip("_") if isinstance(target, OpOverload) else ""


def argument(call: Call, name: str, default: Any = None) -> Any:
    """The argument that the op's schema calls ``name``; ``default`` if the call leaves it out."""
    target, args, kwargs = call
    if name in kwargs:
        return kwargs[name]
    for position, parameter in enumerate(target._schema.arguments):
        if parameter.name == name:
            return args[position] if position < len(args) else default
    return default


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class Builder:
    """Appends nodes to ``graph``; each gets a :class:`Fact`, with the present ``source``."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, Fact] = {}
        self.mode = mode
        self.source = UNKNOWN
        self.constants: dict[str, Tensor] = {}
        self.leaf: dict[fx.Node, int] = {}
        self._detached: dict[fx.Node, fx.Node] = {}
        self._carries: dict[tuple[Any, ...], bool | tuple[bool, ...]] = {}

    def val(self, value: Any) -> Any:
        """``value`` with fake values in place of nodes."""
        return fx.map_arg(value, lambda n: self.facts[n].val)

    def grad(self, node: fx.Node) -> bool:
        flag = self.facts[node].grad
        return any(flag) if isinstance(flag, tuple) else flag

    def read(self, op: str, name: str, val: Tensor, grad: bool = False) -> fx.Node:
        """A placeholder or a ``get_attr``."""
        node = self.graph.create_node(op, name, (), {})
        self.facts[node] = Fact(val, self.source, grad)
        return node

    def constant(self, value: Tensor) -> fx.Node:
        """A ``get_attr`` of a new constant."""
        name = f"<constant {len(self.constants)}>"  # no state has such a name
        self.constants[name] = value
        with self.fake():
            val = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        return self.read("get_attr", name, val)

    def emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        val: Fake = None,
    ) -> fx.Node:
        """A call of ``target``; its fake value is computed where it is not given."""
        kwargs = kwargs or {}
        if val is None:
            fake_args, fake_kwargs = self.val((args, kwargs))
            with torch.no_grad(), self.fake():
                val = target(*fake_args, **fake_kwargs)
        node = self.graph.create_node("call_function", target, args, kwargs, op_name(target))
        self.facts[node] = Fact(val, self.source, self._result_grad(node, val))
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Output ``index`` of a node with several outputs."""
        fact = self.facts[node]
        val = fact.val[index]
        flag = fact.grad[index] if isinstance(fact.grad, tuple) else fact.grad
        name = f"{node.name}_{index}"
        item = self.graph.create_node("call_function", operator.getitem, (node, index), {}, name)
        self.facts[item] = Fact(val, self.source, flag and floating(val))
        return item

    def detach(self, node: fx.Node) -> fx.Node:
        """``node`` without its gradient: itself if it has none."""
        if not self.grad(node):
            return node
        if node not in self._detached:
            self._detached[node] = self.emit(aten.detach.default, (node,))
        return self._detached[node]

    def fake(self) -> Any:
        """The fake mode of the trace, as a context."""
        return self.mode if self.mode is not None else nullcontext()

    def _result_grad(self, node: fx.Node, val: Fake) -> bool | tuple[bool, ...]:
        several = isinstance(val, (tuple, list))
        flags = tuple(self.grad(n) for n in node.all_input_nodes)
        if not any(flags):
            return (False,) * len(val) if several else False
        if not several and not floating(val):
            return False
        key = (node.target, flags, len(val) if several else 0)
        if key not in self._carries:
            self._carries[key] = self._ask_autograd(node, several)
        flag = self._carries[key]
        if isinstance(flag, tuple):
            return tuple(f and floating(v) for f, v in zip(flag, val, strict=True))
        return flag

    def _ask_autograd(self, node: fx.Node, several: bool) -> bool | tuple[bool, ...]:
        """Run the op on fake leaves that require gradients, and see what its result requires."""

        def leaf(n: fx.Node) -> Any:
            val = self.facts[n].val
            if not isinstance(val, Tensor):
                return val
            return torch.empty_like(val).requires_grad_(self.grad(n) and floating(val))

        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        try:
            with torch.enable_grad(), self.fake():
                args, kwargs = fx.map_arg((node.args, node.kwargs), leaf)
                result = target(*args, **kwargs)
        except Exception:  # cannot be run alone: assume that it carries gradients
            return (True,) * len(self.facts[node].val) if several else True
        if several:
            return tuple(isinstance(r, Tensor) and r.requires_grad for r in result)
        return bool(result.requires_grad)
