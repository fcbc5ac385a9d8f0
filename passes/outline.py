"""outline: equal layers become one block that is called many times."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from graphpar.cost import is_contraction
from graphpar.program import (
    Info,
    Program,
    derive,
    info,
    set_info,
)

NAME = "outline"
_CALL_SUFFIX = re.compile(r"@\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """``min_contractions``: a module with fewer matrix products is never a block."""

    min_contractions: int = 2


def outline(program: Program, options: Outline = Outline()) -> Program:
    """Turn module calls of equal structure into calls of one shared block graph.

    Two calls are equal if their nodes are: ops, arguments, shapes, state by name relative to the
    module. Also a single layer of a numbered container becomes a block, so that its boundary is
    seen. Needs: a flat program. Ensures: the same ops in the same order. Numerics: bitwise.
    """
    spans = _choose(_Tree(program), options)
    blocks: dict[str, fx.Graph] = {}
    calls: dict[str, str] = {}
    names: dict[Hashable, str] = {}
    for span in spans:
        if span.key not in names:
            names[span.key] = _unique(_pretty(span.path), blocks)
            blocks[names[span.key]] = span.extract()
        calls[span.path] = names[span.key]
    graph = _with_calls(program.graph, spans)
    return replace(program, graph=graph, blocks=blocks, calls=calls)


def _with_calls(graph: fx.Graph, spans: Sequence[_Span]) -> fx.Graph:
    """A copy with a call in the place of each span; state that only spans read is left out."""
    inner = {node: span for span in spans for node in span.nodes}
    inputs = {node for span in spans for node in span.inputs}
    new, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in inner:
            if node is inner[node].nodes[-1]:
                inner[node].call_in(new, values)
        elif node.op != "get_attr" or node in inputs or any(u not in inner for u in node.users):
            values[node] = new.node_copy(node, values.__getitem__)
    return new


def _pretty(path: str) -> str:
    """``transformer.h.3`` → ``transformer_h``."""
    return "_".join(p for p in path.split(".") if not p.isdigit()) or "block"


def _unique(name: str, taken: Container[str]) -> str:
    number = 2
    candidate = name
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


@dataclass(slots=True)
class _Span:
    """The consecutive nodes of one module call."""

    call: str
    nodes: list[fx.Node]
    program: Program
    children: dict[str, _Span] = field(default_factory=dict)
    contiguous: bool = True
    position: int = 0
    products: int = 0
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    key: Hashable = None

    @property
    def path(self) -> str:
        return _CALL_SUFFIX.sub("", self.call)

    @property
    def is_numbered(self) -> bool:
        return self.path.rsplit(".", 1)[-1].isdigit()

    def state(self, node: fx.Node) -> str | None:
        """The name of a state node relative to the module, if it lies within it."""
        if node.op != "get_attr" or str(node.target) in self.program.constants:
            return None
        for name in self.program.state[str(node.target)].names:
            if name.startswith(self.path + "."):
                return name[len(self.path) + 1 :]
        return None

    def seal(self) -> None:
        """Find inputs and outputs, and the key that equal spans share."""
        index = {node: i for i, node in enumerate(self.nodes)}
        externals: dict[fx.Node, int] = {}
        inner = set(self.nodes)
        rows: list[Hashable] = []

        def reference(node: fx.Node) -> Hashable:
            if node in index:
                return "node", index[node]
            name = self.state(node)
            if name is not None:
                found = self.program.state[str(node.target)]
                return "state", name, found.kind, found.spec
            place = externals.setdefault(node, len(externals))
            return "input", place, info(node).spec

        for node in self.nodes:
            arguments = _hashable((node.args, node.kwargs), reference)
            rows.append((node.target, arguments, info(node).spec))
            if any(user not in inner for user in node.users):
                self.outputs.append(node)
        self.inputs = list(externals)
        self.key = (tuple(rows), tuple(index[node] for node in self.outputs))

    def extract(self) -> fx.Graph:
        """The block graph, made from this span."""
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        taken = {node.name for node in self.nodes}
        for position, value in enumerate(self.inputs):
            name = "x" if value.op != "get_attr" else str(value.target).rsplit(".", 1)[-1]
            name = f"{name}_{position}" if position else name
            nodes[value] = graph.placeholder(_unique(name, taken))
            set_info(nodes[value], replace(info(value), origin=NAME))
            taken.add(nodes[value].name)

        def state(node: fx.Node) -> fx.Node:
            if node not in nodes:
                name = self.state(node)
                assert name is not None
                nodes[node] = graph.get_attr(name)
                nodes[node].name = _unique(nodes[node].name, taken)
                set_info(nodes[node], info(node))
                taken.add(nodes[node].name)
            return nodes[node]

        for node in self.nodes:
            nodes[node] = graph.node_copy(node, state)
            nodes[node].name = node.name
        results = tuple(nodes[node] for node in self.outputs)
        output = graph.output(results)
        set_info(output, Info(None, info(self.nodes[-1]).source, NAME))
        return graph

    def call_in(self, graph: fx.Graph, values: dict[fx.Node, fx.Node]) -> None:
        """Add a call of the block to ``graph``; ``values`` maps this graph's nodes to its own."""
        specs = tuple(info(node).spec for node in self.outputs)
        inputs = tuple(values[node] for node in self.inputs)
        call = graph.create_node("call_module", self.path, inputs)
        set_info(call, Info(specs, info(self.nodes[0]).source, NAME))  # type: ignore[arg-type]
        for position, value in enumerate(self.outputs):
            values[value] = derive(
                graph, operator.getitem, (call, position), like=value, origin=NAME
            )


def _hashable(value: Any, reference: Callable[[fx.Node], Hashable]) -> Hashable:
    """Arguments of a node as a key, with ``reference`` of each node among them."""
    if isinstance(value, fx.Node):
        return reference(value)
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v, reference) for v in value)
    if isinstance(value, dict):
        return tuple((k, _hashable(v, reference)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    return type(value), value


class _Tree:
    """The module calls of a flat graph, by path prefix."""

    def __init__(self, program: Program) -> None:
        self.root = _Span("", [], program)
        last: dict[int, tuple[_Span, int]] = {}
        for position, node in enumerate(
            n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr", "output")
        ):
            span, prefix = self.root, ""
            for part in info(node).source.module.split("."):
                if not part:
                    break
                prefix = f"{prefix}.{part}" if prefix else part
                if prefix not in span.children:
                    span.children[prefix] = _Span(prefix, [], program)
                span = span.children[prefix]
                _, previous = last.get(id(span), (span, position - 1))
                span.contiguous &= previous == position - 1
                last[id(span)] = span, position
                if not span.nodes:
                    span.position = position
                span.nodes.append(node)
                span.products += is_contraction(node.target)


def _choose(tree: _Tree, options: Outline) -> list[_Span]:
    """The outermost spans that repeat, or are a numbered child on their own.

    Goes down level by level; only spans that look alike are compared in full.
    """
    chosen: list[_Span] = []
    level = list(tree.root.children.values())
    while level:
        alike: dict[Hashable, list[_Span]] = {}
        for span in level:
            if span.contiguous and span.products >= options.min_contractions:
                alike.setdefault(tuple(n.target for n in span.nodes), []).append(span)
        groups: dict[Hashable, list[_Span]] = {}
        for spans in alike.values():
            for span in spans:
                if len(spans) > 1 or span.is_numbered:
                    span.seal()
                    groups.setdefault(span.key, []).append(span)
        keys_of_path: dict[str, set[Hashable]] = {}
        for key, spans in groups.items():
            for span in spans:
                keys_of_path.setdefault(span.path, set()).add(key)
        found = {
            id(span)
            for spans in groups.values()
            for span in spans
            if span.outputs
            and (len(spans) > 1 or span.is_numbered)
            and len(keys_of_path[span.path]) == 1
        }
        chosen += [span for span in level if id(span) in found]
        level = [
            child for span in level if id(span) not in found for child in span.children.values()
        ]
    return sorted(chosen, key=lambda span: span.position)
