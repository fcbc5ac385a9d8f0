"""From nodes that backward is to run again to regions that can be checkpointed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx
import torch
from torch import fx

from graphpar.cost import GraphRun, Kernel, Step
from graphpar.program import Region, holds_tensors, info
from graphpar.snapshots import SNAPSHOT
from graphpar.trace.fold import draws
from graphpar.unfuse import gathered_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Disjoint regions of one graph, and what they come to. ``kernels`` are those of the replays.

    ``members`` maps each node of a region to it. Of these, backward runs ``replayed`` again, on
    the values that autograd keeps. What the nodes ``held`` make is kept inside. ``saved`` are the
    storages (keys of :attr:`GraphRun.storages`) that are kept, state left out, and
    ``transient_bytes`` what the largest region makes anew at once.
    """

    order: tuple[fx.Node, ...]
    members: Mapping[fx.Node, Region] = field(default_factory=dict)
    replayed: frozenset[fx.Node] = frozenset()
    held: frozenset[fx.Node] = frozenset()
    saved: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    kernels: tuple[Kernel, ...] = ()
    transient_bytes: int = 0


def random_by_generator(node: fx.Node) -> bool:
    """Whether the op draws from the device's own generator: its place in the order matters."""
    return draws(node) or node.target is torch.ops.graphpar.dropout.default


def replayable(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in _ONCE


_ONCE = {torch.ops.graphpar.draw_seed.default, SNAPSHOT}
_PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.matmul.default}


def find_regions(run: GraphRun, replay: Iterable[fx.Node]) -> Regions:
    """Regions in which what the nodes of ``replay`` make is not kept.

    A region holds such nodes and the nodes that autograd would keep their results for. Where a
    path leaves a region and comes back, its nodes join it. Draws of random numbers keep their
    order. A region that would take in the call of a block is left out.
    """
    wanted = {node for node in replay if replayable(node)}
    analysis = _Analysis(run)
    while True:
        groups = analysis.groups(wanted)
        bad = [group for group in groups if any(n.op == "call_module" for n in group)]
        if not bad:
            return analysis.regions(groups, wanted)
        wanted -= set().union(*bad)


class _Analysis:
    def __init__(self, run: GraphRun) -> None:
        self.run = run
        self.steps: dict[fx.Node, Step] = {step.node: step for step in run.steps}
        self.makes: dict[fx.Node, set[int]] = {node: set() for node in self.steps}
        for number, storage in run.storages.items():
            if storage.maker in self.makes:
                self.makes[storage.maker].add(number)
        self.index = {node: i for i, node in enumerate(self.steps)}

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self.steps]

    # --- membership ---

    def groups(self, wanted: set[fx.Node]) -> list[set[fx.Node]]:
        """The nodes of each region."""
        members = self._needed(wanted)
        needed = {s for node in members for s in self.makes[node]}
        members |= {n for n, step in self.steps.items() if needed.intersection(step.saves)}
        stack = list(members)
        links: list[tuple[fx.Node, fx.Node]] = []
        while stack:  # the values that members read of dropped storages
            node = stack.pop()
            for value in self.inputs(node):
                if needed.intersection(self.steps[value].results):
                    links.append((value, node))
                    if value not in members:
                        members.add(value)
                        stack.append(value)
        found = nx.Graph(links)
        found.add_nodes_from(members)
        return self._closed([set(c) for c in nx.connected_components(found)])

    def _needed(self, wanted: Collection[fx.Node]) -> set[fx.Node]:
        """Those of the nodes whose values backward, or another one of them, reads."""
        live = {s for step in self.run.steps for s in step.saves}
        found = set[fx.Node]()
        for node, step in reversed(self.steps.items()):
            if node in wanted and not live.isdisjoint(self.makes[node]):
                found.add(node)
                live.update(step.reads)
        return found

    def _closed(self, groups: list[set[fx.Node]]) -> list[set[fx.Node]]:
        """Groups grown until the graph of groups and other nodes has no cycle."""
        owner = {node: -1 - i for i, group in enumerate(groups) for node in group}
        units = nx.DiGraph()
        for node in self.steps:
            units.add_node(owner.get(node, self.index[node]))
        for before, after in self._order_constraints():
            pair = tuple(owner.get(n, self.index[n]) for n in (before, after))
            if pair[0] != pair[1]:
                units.add_edge(*pair)
        nodes = list(self.steps)
        closed = []
        for component in nx.strongly_connected_components(units):
            group: set[fx.Node] = set()
            for unit in component:
                group |= {nodes[unit]} if unit >= 0 else groups[-1 - unit]
            if any(unit < 0 for unit in component):
                closed.append(group)
        return closed

    def _order_constraints(self) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs of nodes that keep their order: of data, of draws, and of sums of gradients.

        Autograd runs backward in the reverse order of forward, so three or more uses of a value
        are summed in that order. What comes from outside or is returned has uses there too, and
        an op that is made of others, or a block, may use a value more than once.
        """
        pairs = [(value, node) for node in self.steps for value in self.inputs(node)]
        pairs += pairwise(node for node in self.steps if random_by_generator(node))
        uses: dict[fx.Node, list[fx.Node]] = {}
        returned = set()
        for node, step in self.steps.items():
            if any(user.op == "output" for user in node.users):
                returned.add(self._itself(node))
            if not step.identity and _differentiable(node):
                for value in node.all_input_nodes:
                    uses.setdefault(self._itself(value), []).append(node)
        for value, users in uses.items():
            outside = value not in self.steps or value in returned
            if len(users) > 2 or outside or not all(map(_single_use, users)):
                pairs += pairwise(users)
        return pairs

    def _itself(self, value: fx.Node) -> fx.Node:
        """The node that made the tensor that ``value`` passes on."""
        while value in self.steps and self.steps[value].identity:
            value = value.all_input_nodes[0]
        return value

    # --- what the regions come to ---

    def regions(self, groups: Sequence[set[fx.Node]], wanted: Collection[fx.Node]) -> Regions:
        order = self._order(groups)
        place = {node: i for i, node in enumerate(order)}
        members: dict[fx.Node, Region] = {}
        replayed: set[fx.Node] = set()
        held: set[fx.Node] = set()
        kept_storages: set[int] = set()
        kernels: list[Kernel] = []
        transient = 0
        for number, group in enumerate(sorted(groups, key=lambda g: min(place[n] for n in g))):
            nodes = sorted(group, key=place.__getitem__)
            again, live, inside = self._again(nodes, wanted)
            kept, passed = self._arguments(nodes, again, live)
            region = Region(
                number=number,
                kept=tuple(n.name for n in kept),
                passed=tuple(n.name for n in passed),
                random=any(map(random_by_generator, again)),
            )
            members |= dict.fromkeys(nodes, region)
            replayed |= again
            held |= inside
            for n in inside:
                kept_storages |= self.makes[n] & live
            for n in nodes:
                kernels += self.steps[n].again if n in again else ()
            kept_storages |= {s for n in kept for s in self._storages(n)}
            transient = max(transient, self._transient([n for n in nodes if n in again]))
        outside = {s for n, step in self.steps.items() if n not in members for s in step.saves}
        saved = {s for s in outside | kept_storages if not self.run.storages[s].resident}
        return Regions(
            order=tuple(order),
            members=members,
            replayed=frozenset(replayed),
            held=frozenset(held),
            saved=frozenset(saved),
            kept=frozenset(saved & kept_storages),
            kernels=tuple(kernels),
            transient_bytes=transient,
        )

    def _order(self, groups: Sequence[set[fx.Node]]) -> list[fx.Node]:
        """The nodes in an order as it was, except that each group is together."""
        owner = {node: -1 - i for i, group in enumerate(groups) for node in group}
        units = nx.DiGraph()
        first: dict[int, int] = {}
        for node, index in self.index.items():
            unit = owner.get(node, index)
            units.add_node(unit)
            first[unit] = max(first.get(unit, 0), index)
        for before, after in self._order_constraints():
            pair = tuple(owner.get(n, self.index[n]) for n in (before, after))
            if pair[0] != pair[1]:
                units.add_edge(*pair)
        nodes = list(self.steps)
        order: list[fx.Node] = []
        for unit in nx.lexicographical_topological_sort(units, key=first.__getitem__):
            if unit >= 0:
                order.append(nodes[unit])
            else:
                order += sorted(groups[-1 - unit], key=self.index.__getitem__)
        return order

    def _again(
        self, nodes: Sequence[fx.Node], wanted: Collection[fx.Node]
    ) -> tuple[set[fx.Node], set[int], set[fx.Node]]:
        """The nodes to run again, the storages that must have their values, and the nodes whose
        are held. Of random draws those before one that is made again run again too."""
        live = {s for node in nodes for s in self.steps[node].saves}
        again: set[fx.Node] = set()
        held: set[fx.Node] = set()
        draws = False
        for node in reversed(nodes):
            random = random_by_generator(node)
            if self.makes[node]:
                needed = not live.isdisjoint(self.makes[node])
                runs = (needed and node in wanted) or (draws and random)
                if needed and not runs:
                    held.add(node)
            else:  # a view
                runs = random or any(user in again for user in node.users)
            if runs:
                again.add(node)
                live.update(self.steps[node].reads)
                draws |= random
        return again, live, held

    def _arguments(
        self, nodes: Sequence[fx.Node], again: set[fx.Node], live: set[int]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """The values from outside that the region reads: those to keep, and the others."""
        inside = set(nodes)
        kept: dict[fx.Node, None] = {}
        read: dict[fx.Node, None] = {}
        for node in nodes:
            for value in node.all_input_nodes:
                if value in inside or value.op == "get_attr" or not holds_tensors(value):
                    continue
                read[value] = None
                if node in again or live.intersection(self._storages(value)):
                    kept[value] = None
        return list(kept), [value for value in read if value not in kept]

    def _transient(self, again: Sequence[fx.Node]) -> int:
        """The most bytes that a replay holds at once: what backward needs, to its end, and what
        only the replay reads, to its last use there."""
        needed = {s for step in self.run.steps for s in step.saves}
        last = {s: node for node in again for s in self.steps[node].reads}
        held: set[int] = set()
        most = gathered = 0
        for node in again:
            held |= self.makes[node]
            gathered += gathered_bytes(node)  # which a fused op keeps in its second run
            most = max(most, gathered + sum(self.run.storages[s].nbytes for s in held))
            held -= {s for s in self.steps[node].reads if last[s] is node and s not in needed}
        return most

    def _storages(self, node: fx.Node) -> tuple[int, ...]:
        if node in self.steps:
            return self.steps[node].results
        entries = [n for n in node.graph.nodes if n.op == "placeholder"]
        number = self.run.inputs[entries.index(node)]
        return () if number is None else (number,)


def _differentiable(node: fx.Node) -> bool:
    spec = info(node).spec
    specs = spec if isinstance(spec, tuple) else (spec,)
    return any(s is not None and s.differentiable for s in specs)


def _single_use(node: fx.Node) -> bool:
    """Whether autograd certainly sums one addend for each value that the op reads."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or len(node.all_input_nodes) != _reads(node):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )
    return op in _PRODUCTS or not composite


def _reads(node: fx.Node) -> int:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return len(found)
