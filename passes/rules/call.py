"""The view of an op call that a rule gets, and the answer it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpar.axes import TermDim, TermDims, unify
from graphpar.passes.rules.forms import whole_op
from graphpar.program import TensorSpec, info

Shape = tuple[int, ...]
LocalArgument = Callable[[list[Shape], list[Shape]], Any]
"""From all operands' and all results' local shapes to an argument's local value."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: its place among the call's operands, its axes and its whole tensor."""

    index: int
    dims: TermDims
    spec: TensorSpec

    @property
    def shape(self) -> Shape:
        return self.spec.shape


@dataclass(frozen=True, slots=True)
class Call:
    """An op call: ``named`` maps the schema's argument names to values (defaults filled in),
    with an :class:`Operand` in place of each tensor."""

    target: torch._ops.OpOverload
    named: Mapping[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[TensorSpec, ...]

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.named.get(name)
        return default if value is None else value

    @property
    def x(self) -> Operand:
        return self.operands[0]

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """The non-negative value of a dimension argument."""
        rank = len(self.x.shape) if rank is None else rank
        return int(self[name]) % max(rank, 1)


@dataclass(slots=True)
class OpRule:
    """What a rule answers; see :class:`graphpar.axes.OpAxes` for the meaning of the fields.

    ``whole`` keeps all axes within its terms whole. An axis that only operands have cannot be cut
    unless it is ``contracted`` or ``reduced``, and one that only results have (a concatenation of
    operands is one) unless it is among ``made``, the axes that the op can make in parts. ``own``
    are the dimensions of the first operand along which shards need the op's own form
    (:mod:`graphpar.passes.rules.forms`). Parts of sharded dimensions must have a ``multiple`` of
    so many elements. ``local`` gives the local value of size arguments by name.
    """

    results: list[TermDims]
    whole: TermDim = field(default_factory=list)
    contracted: TermDim = field(default_factory=list)
    reduced: TermDim = field(default_factory=list)
    own: Sequence[int] = ()
    made: TermDim = field(default_factory=list)
    partial: Sequence[set[int]] = ()
    average: bool = False
    multiple: int = 1
    local: dict[str, LocalArgument] = field(default_factory=dict)


Rule = Callable[[Call], OpRule | None]
"""Ties axes and describes the call; ``None``: this form of the op is opaque."""


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of an op call in the order of its schema, repeated ones repeated."""
    args, kwargs = info(node).whole_call or (node.args, node.kwargs)
    found: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), found.append)
    return found


def call_of(node: fx.Node, dims: Callable[[fx.Node], TermDims]) -> Call:
    """The call of an op (of the one that a form on shards stands for); ``dims`` gives the axes of
    its arguments."""
    target = whole_op(node.target)
    assert isinstance(target, torch._ops.OpOverload)
    args, kwargs = info(node).whole_call or (node.args, node.kwargs)
    operands: list[Operand] = []

    def operand(argument: fx.Node) -> Operand:
        spec = info(argument).spec
        assert isinstance(spec, TensorSpec), f"{argument} is not a tensor"
        operands.append(Operand(len(operands), dims(argument), spec))
        return operands[-1]

    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return operand(value)
        if isinstance(value, (list, tuple)):
            return [convert(v) for v in value]
        return value

    named: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            named[argument.name] = convert(args[position])
        elif argument.name in kwargs:
            named[argument.name] = convert(kwargs[argument.name])
        else:
            named[argument.name] = argument.default_value
    spec = info(node).spec
    results = (spec,) if isinstance(spec, TensorSpec) else tuple(s for s in spec or () if s)
    return Call(target, named, tuple(operands), results)


def broadcast(operands: Sequence[Operand]) -> tuple[TermDims, TermDim]:
    """The common dimensions of operands, from the right, and what could not be unified."""
    rank = max((len(o.shape) for o in operands), default=0)
    columns: list[list[tuple[int, TermDim]]] = [[] for _ in range(rank)]
    for operand in operands:
        offset = rank - len(operand.shape)
        for d, (size, dim) in enumerate(zip(operand.shape, operand.dims, strict=True)):
            columns[offset + d].append((size, dim))
    return tie(columns)


def tie(groups: Sequence[Sequence[tuple[int, TermDim]]]) -> tuple[list[TermDim], TermDim]:
    """Broadcast: unify the dimensions of each group of (size, dimension), skipping size 1.

    Returns the common dimension of each group and the terms that could not be unified.
    """
    common: list[TermDim] = []
    stuck: TermDim = []
    for group in groups:
        size = max((s for s, _ in group), default=1)
        present = [dim for s, dim in group if s == size]
        for dim in present[1:]:
            stuck += unify(present[0], dim)
        common.append(present[0] if present else [])
    return common, stuck
