"""name_axes: find what every dimension of every tensor is made of."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpar.axes import Freezer, OpAxes, TermDim, TermDims, fresh, unify
from graphpar.errors import GraphparWarning
from graphpar.passes.rules import Call, OpRule
from graphpar.passes.rules.table import apply_rule, freeze
from graphpar.program import (
    Program,
    TensorSpec,
    annotate,
    copy_program,
    flat_nodes,
    info,
    is_getitem,
    outputs,
    placeholders,
    tensor_spec,
)

NAME = "name-axes"
_TermValue = TermDims | tuple[TermDims | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameAxes:
    """``warn``: say which ops have no rule, and so run whole on every rank."""

    warn: bool = True


def name_axes(program: Program, options: NameAxes = NameAxes()) -> Program:
    """Give every node the axes of its dimensions, and every op its rule in terms of them.

    A block is analysed once; all its calls share its axes. Needs: normalized graphs. Ensures:
    ``Info.dims`` on every tensor, ``Info.axes`` on every op and block call. Numerics: bitwise.
    """
    program = copy_program(program)
    analysis = _Analysis(program)
    analysis.run()
    analysis.finish()
    if options.warn:
        for node in analysis.opaque:
            source = info(node).source
            warnings.warn(
                f"{node.target} has no partitioning rule: its inputs are gathered and it runs "
                f"whole on every rank\n  at {source}",
                GraphparWarning,
                stacklevel=2,
            )
    return program


class _Analysis:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[fx.Node, _TermValue] = {}
        self.rules: dict[fx.Node, tuple[Call, OpRule | None]] = {}
        self.calls: dict[fx.Node, tuple[list[TermDims], TermDim]] = {}
        self.state: dict[str, TermDims] = {}
        self.entered: dict[str, list[fx.Node]] = {}
        self.opaque: list[fx.Node] = []

    def dims(self, node: fx.Node) -> TermDims:
        value = self.values[node]
        assert isinstance(value, list), node
        return value

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            else:
                self._node(node, "")

    def _placeholder(self, node: fx.Node) -> TermDims:
        dims = fresh(tensor_spec(node).shape)
        names = ["batch", "sequence"] if len(dims) > 1 else ["batch"]
        for dim, name in zip(dims, names, strict=False):
            for term in dim:
                term.name = name
        return dims

    def _node(self, node: fx.Node, block: str) -> None:
        if node.op == "get_attr":
            self.values[node] = self._state(self.program.state_name(block, node), node)
        elif node.op == "call_module":
            self._call(node)
        elif is_getitem(node):
            value = self.values[node.args[0]]  # type: ignore[index]
            assert isinstance(value, tuple)
            self.values[node] = value[node.args[1]]  # type: ignore[index]
        elif node.op == "call_function":
            self._op(node)

    def _state(self, name: str, node: fx.Node) -> TermDims:
        if name not in self.state:
            self.state[name] = fresh(tensor_spec(node).shape)
            parts = name.split(".")
            owner = next((p for p in parts[-2::-1] if not p.isdigit()), parts[-1])
            for dim in self.state[name]:
                for term in dim:
                    term.name = owner
        return self.state[name]

    def _op(self, node: fx.Node) -> None:
        call, rule = apply_rule(node, self.dims)
        self.rules[node] = call, rule
        if rule is None:
            if call.operands:  # all others, random numbers mostly, are made whole on every rank
                self.opaque.append(node)
            rule = OpRule([fresh(r.shape) for r in call.results])
        spec, results = info(node).spec, iter(rule.results)
        if isinstance(spec, TensorSpec):
            self.values[node] = next(results)
        elif spec is not None:
            self.values[node] = tuple(next(results) if s else None for s in spec)

    def _call(self, node: fx.Node) -> None:
        block = self.program.calls[str(node.target)]
        graph = self.program.blocks[block]
        arguments = [self.values[a] for a in flat_nodes(node.args)]
        inputs, stuck = placeholders(graph), []
        if block not in self.entered:
            self.entered[block] = inputs
            for inner, value in zip(inputs, arguments, strict=True):
                self.values[inner] = value
            for inner in graph.nodes:
                if inner.op != "placeholder":
                    self._node(inner, block)
        else:
            for inner, value in zip(inputs, arguments, strict=True):
                stuck += _tie(self.values[inner], value)
        self.calls[node] = [v for v in arguments if isinstance(v, list)], stuck
        self.values[node] = tuple(self.values[v] for v in outputs(graph))  # type: ignore[misc]

    def finish(self) -> None:
        """Freeze all axes and write them on the nodes."""
        freezer = Freezer()
        for _, graph in reversed(list(self.program.graphs())):
            for node in graph.nodes:
                changes: dict[str, Any] = {}
                value = self.values.get(node)
                if isinstance(value, list):
                    changes["dims"] = freezer.dims(value)
                elif value is not None:
                    changes["dims"] = tuple(v if v is None else freezer.dims(v) for v in value)
                if node in self.rules:
                    changes["axes"] = freeze(freezer, *self.rules[node])
                elif node in self.calls:
                    arguments, stuck = self.calls[node]
                    changes["axes"] = OpAxes(
                        tuple(map(freezer.dims, arguments)),
                        changes["dims"],
                        whole=freezer.all_axes(stuck),
                    )
                if changes:
                    annotate(node, **changes)


def _tie(a: _TermValue, b: _TermValue) -> TermDim:
    assert isinstance(a, list)
    assert isinstance(b, list)
    return [t for x, y in zip(a, b, strict=True) for t in unify(x, y)]
