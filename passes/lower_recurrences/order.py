"""The order of a graph's nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from torch import fx

from graphpar.program import output_node


def reorder(graph: fx.Graph) -> None:
    """Put each node behind what it reads; nodes that are stay in order."""
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    ordered = ordered_nodes(nodes, lambda node: node.all_input_nodes, places.__getitem__)
    if ordered != nodes:
        end = output_node(graph)
        for node in ordered[:-1]:
            end.prepend(node)


def ordered_nodes(
    nodes: Sequence[fx.Node],
    inputs: Callable[[fx.Node], Iterable[fx.Node]],
    place: Callable[[fx.Node], int],
) -> list[fx.Node]:
    """The nodes, by place as far as their inputs allow."""
    reads = {node: set(inputs(node)) for node in nodes}
    missing = {node: len(read) for node, read in reads.items()}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node, read in reads.items():
        for each in read:
            users[each].append(node)
    ready = [(place(n), i) for i, n in enumerate(nodes) if not missing[n]]
    number = {node: i for i, node in enumerate(nodes)}
    heapq.heapify(ready)
    found = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        found.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place(user), number[user]))
    assert len(found) == len(nodes)
    return found
