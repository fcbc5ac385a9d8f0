"""The last step: what is live, with tidy names and one Info each."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any

from torch import Tensor, fx
from torch.fx.graph import _Namespace

from graphpar.program import Info, Spec, set_info, spec_of
from graphpar.provenance import Source
from graphpar.trace.build import Builder, Fact, op_name
from graphpar.trace.fold import live_nodes


def finish(
    builder: Builder, outputs: list[Any], start: Source, taken: Collection[str]
) -> dict[str, Tensor]:
    """Make the builder's graph the Program's, with ``outputs``; its constants by their names.

    Constants are named ``constant_0``, ... in order, passing over the names in ``taken``.
    """
    graph = builder.graph
    live = live_nodes(graph, outputs)
    for node in reversed(graph.nodes):
        if node not in live:
            graph.erase_node(node)
    names = graph._graph_namespace = _Namespace()
    constants: dict[str, Tensor] = {}
    specs: dict[Any, Spec] = {}
    for node in graph.nodes:
        fact = builder.facts[node]
        if node.op == "get_attr" and node.target in builder.constants:
            name = next(c for i in count(len(constants)) if (c := f"constant_{i}") not in taken)
            constants[name] = builder.constants[node.target]
            node.target = name
        node.name = names.create_name(_candidate(node), node)
        same = id(fact.val), fact.grad  # layers traced once share their values
        if same not in specs:
            specs[same] = _spec(fact)
        set_info(node, Info(specs[same], fact.source))
    set_info(graph.output(tuple(outputs)), Info(None, start))
    return constants


def _candidate(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target).replace(".", "_")
    return op_name(node.target) or f"{node.args[0]}_{node.args[1]}"


def _spec(fact: Fact) -> Spec:
    if isinstance(fact.val, Tensor):
        return spec_of(fact.val, differentiable=bool(fact.grad))
    if not isinstance(fact.val, (tuple, list)):
        return None
    flags = fact.grad if isinstance(fact.grad, tuple) else (fact.grad,) * len(fact.val)
    return tuple(
        spec_of(v, differentiable=flag) if isinstance(v, Tensor) else None
        for v, flag in zip(fact.val, flags, strict=True)
    )
