"""joined: slices that make up a tensor, as the one op that cuts it.

A slice's gradient is a tensor of zeros with a part written, and those of all slices are added; the
gradient of ``split_with_sizes`` is one concatenation. Code that runs has the one op in their place.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphpar.program import Program, copy_graph, derive, info, is_tensor, take_place, tensor_spec
from graphpar.types import Shard

aten = torch.ops.aten
_JOINING = {aten.cat.default, aten.stack.default}


def join_slices(program: Program) -> Program:
    """The same numbers (but for the sign of zeros among gradients), with fewer ops.

    Slices are joined that follow each other along a dimension that the ranks do not cut, from its
    beginning to its end, where ops that make new tensors read them: the results of a split are
    views that may not be written to. Regions that backward runs again stay as they are.
    """
    graphs = {}
    for name, graph in program.graphs():
        if any(len(slices) > 1 for slices in _groups(graph).values()):
            graphs[name] = copy_graph(graph)[0]
            for (x, dim), slices in _groups(graphs[name]).items():
                _join(x, dim, slices)
    return program.with_graphs(graphs)


def _groups(graph: fx.Graph) -> dict[tuple[fx.Node, int], list[fx.Node]]:
    """The slices of each tensor along each dimension."""
    found: defaultdict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten.slice.Tensor and info(node).region is None and not node.kwargs:
            x, dim, *bounds = node.args
            if len(bounds) == 2 and all(type(b) is int and b >= 0 for b in bounds):
                found[x, dim % len(tensor_spec(node).shape)].append(node)
    return found


def _join(x: fx.Node, dim: int, slices: Sequence[fx.Node]) -> None:
    sizes = _sizes(x, dim, slices)
    if len(sizes) < 2 or not all(_makes_anew(user) for node in slices for user in node.users):
        return
    graph, first = slices[0].graph, slices[0]
    ordered = sorted(slices, key=lambda node: node.args[2])  # type: ignore[arg-type,return-value]
    with graph.inserting_before(first):
        parts = derive(
            graph,
            aten.split_with_sizes.default,
            (x, sizes, dim),
            like=first,
            origin=info(first).origin,
            name=f"{x.name}_parts",
            spec=tuple(info(node).spec for node in ordered),
            type=None if info(first).type is None else tuple(info(n).type for n in ordered),
        )
        found = [
            derive(graph, operator.getitem, (parts, i), like=node, origin=info(node).origin)
            for i, node in enumerate(ordered)
        ]
    for part, node in zip(found, ordered, strict=True):
        take_place(part, node)


def _sizes(x: fx.Node, dim: int, slices: Sequence[fx.Node]) -> list[int]:
    """Those of the slices in order; none if they are not all of ``x``, or not known."""
    kind = info(x).type
    if not is_tensor(x) or isinstance(kind, tuple) or (isinstance(kind, Shard) and kind.dim == dim):
        return []
    bounds: list[Any] = sorted(node.args[2:4] for node in slices)
    size, end, sizes = tensor_spec(x).shape[dim], 0, []
    for start, stop in bounds:
        if start != end or stop <= start:
            return []
        end = min(stop, size)
        sizes.append(end - start)
    return sizes if end == size else []


def _makes_anew(user: fx.Node) -> bool:
    target = user.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target in _JOINING
    )
