"""Loops over a cell that were unrolled in the trace: steps that share weights and hand on a state.

Nothing goes by names: a step is what has the form of a cell, and a loop is steps in which each
multiplies the state of the one before with the same matrices.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.passes.lower_recurrences.cells import Gate, Step, products, steps_of
from graphpar.passes.lower_recurrences.forms import Forms, Product
from graphpar.passes.lower_recurrences.pieces import (
    CASTS,
    Piece,
    aten,
    piece,
    shape_of,
    width_of,
)
from graphpar.program import Program, info, tensor_spec

ROOTS = {
    aten.tanh.default,
    aten.relu.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.lerp.Tensor,
    aten.addcmul.default,
}
"""Ops whose result may be a cell's state."""


@dataclass(frozen=True, slots=True)
class Link:
    """A step, read with ``before`` as the state before it.

    Attributes:
        recurrent: of each gate, the product with that state. key: what its matrices are.
        inputs: of each gate, what else is added to it. inner: of a GRU's last gate, what else the
            reset gate multiplies.
    """

    step: Step
    before: fx.Node
    recurrent: tuple[Product, ...]
    key: Hashable
    inputs: tuple[Gate, ...]
    inner: Gate


@dataclass(frozen=True, slots=True)
class Loop:
    """Steps in the order of their states; ``fault``: why they cannot become one op, if so."""

    links: tuple[Link, ...]
    values: Values
    fault: str = ""

    @property
    def cell(self) -> str:
        return self.links[0].step.cell

    @property
    def last(self) -> Step:
        return self.links[-1].step

    @property
    def name(self) -> str:
        module = info(self.links[0].step.h).source.module
        weight = self.links[0].recurrent[0].weight
        return module or (str(weight.target) if weight.op == "get_attr" else "loop")


class Values:
    """Keys of values: equal for nodes that compute the same from state alone, as the product of a
    weight with its mask does at every step."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self._keys: dict[fx.Node, Hashable] = {}
        numbers: dict[Hashable, int] = {}
        for node in graph.nodes:
            key = self._key(program, node)
            self._keys[node] = node if key is None else numbers.setdefault(key, len(numbers))

    def of(self, node: fx.Node) -> Hashable:
        """The key; the node itself, if it depends on more than state."""
        return self._keys[node]

    def _key(self, program: Program, node: fx.Node) -> Hashable | None:
        if node.op == "get_attr":
            return program.canonical(str(node.target))
        if node.op != "call_function" or is_random(node):
            return None
        keys = {n: self._keys[n] for n in node.all_input_nodes}
        if not keys or any(isinstance(key, fx.Node) for key in keys.values()):
            return None
        named: Any = {n: f"<{key}>" for n, key in keys.items()}
        return node.target, repr(fx.node.map_arg((node.args, node.kwargs), named.__getitem__))


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def find_loops(program: Program, graph: fx.Graph) -> list[Loop]:
    """The loops of at least two steps in a flat graph, longest first."""
    forms = Forms(graph)
    if len(forms.products) < 2:
        return []
    values = Values(program, graph)
    uses = Counter(values.of(weight) for _, weight, _ in forms.products.values())
    if max(uses.values()) < 2:
        return []
    widths = {width_of(x) for x in forms.operands}
    groups: dict[Hashable, dict[fx.Node, Link]] = defaultdict(dict)
    for node in graph.nodes:
        if node.target in ROOTS and len(shape_of(node)) == 2 and width_of(node) in widths:
            for step in steps_of(forms, node):
                for link in _links(step, values):
                    groups[link.key][node] = link
    loops = [loop for group in groups.values() for loop in _chains(group, values)]
    loops.sort(key=lambda loop: -len(loop.links))
    rest = [loop for group in groups.values() for loop in _broken(group, values)]
    rest.sort(key=lambda loop: -cell_of(loop.cell).gates)  # a gate of an LSTM looks like an RNN
    taken, found = set[fx.Node](), []
    for loop in (*loops, *rest):
        own = {node for link in loop.links for node in inner_nodes(link)}
        if taken.isdisjoint(link.step.h for link in loop.links):
            taken |= own
            found.append(loop)
    return found


def _matrix(values: Values, product: Product) -> Hashable:
    place = product.first, product.count, product.start, product.size
    return values.of(product.weight), product.turned, place


def _links(step: Step, values: Values) -> Iterator[Link]:
    """Each way to read a step: what of its operands is the state before it."""
    gates = (*step.gates[:-1], step.inner) if step.inner else step.gates
    for before in dict.fromkeys(p.x for p in products(gates[0])):
        if step.h_before not in (None, before):
            continue
        found: list[Product] = []
        for gate in gates:
            own = [p for p in products(gate) if p.x is before and p.count == step.hidden]
            found += own if len(own) == 1 else []
        if len(found) == len(gates):
            key = step.cell, step.negated, *(_matrix(values, p) for p in found)
            inputs = tuple(_without(g, p) for g, p in zip(step.gates, found, strict=True))
            inner = _without(step.inner, found[-1])
            yield Link(step, before, tuple(found), key, inputs, inner)


def _without(gate: Gate, own: Product) -> Gate:
    return tuple(term for term in gate if term is not own)


def _chains(group: Mapping[fx.Node, Link], values: Values) -> Iterator[Loop]:
    """Follow the states from step to step; a state that two steps read goes on with the first."""
    following: dict[fx.Node, Link] = {}
    for link in group.values():
        last = group.get(link.before)
        if last is not None and link.step.c_before == (last.step.c and piece(last.step.c)):
            following.setdefault(link.before, link)
    continued = {link.step.h for link in following.values()}
    for link in group.values():
        if link.step.h in continued:
            continue
        chain = [link]
        while chain[-1].step.h in following:
            chain.append(following[chain[-1].step.h])
        if len(chain) > 1:
            yield Loop(tuple(chain), values, _fault(chain))


def _broken(group: Mapping[fx.Node, Link], values: Values) -> Iterator[Loop]:
    """Steps that share weights, where what one hands on is not quite its state."""
    links = tuple(group.values())
    inside = descendants(link.step.h for link in links)
    changed = [link.before for link in links if link.before in inside]
    if changed:
        kind = tensor_spec(changed[0]).dtype
        how = "changed between steps"
        if changed[0].target in CASTS:
            how = f"cast to {kind} between steps (autocast)"
        yield Loop(links, values, f"its state is {how}: {info(changed[0]).source}")


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that is computed from the nodes; they are in it only if one is from another."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def given_of(link: Link) -> Iterator[fx.Node]:
    """What a step is given: inputs, weights and biases."""
    for own in link.recurrent:
        yield own.weight
    for gate in (*link.inputs, link.inner):
        for term in gate:
            yield from (term.node,) if isinstance(term, Piece) else (term.x, term.weight)


def inner_nodes(link: Link) -> set[fx.Node]:
    """The nodes of a step that depend on the state before it; its ``h`` is one."""
    ends = {*given_of(link), link.before}
    if link.step.c_before is not None:
        ends.add(link.step.c_before.node)
    depends = dict[fx.Node, bool]()

    def visit(node: fx.Node) -> bool:
        if node in ends:
            return node is link.before
        if node not in depends:
            found = {visit(n) for n in node.all_input_nodes}
            depends[node] = True in found
        return depends[node]

    visit(link.step.h)
    return {node for node, found in depends.items() if found}


def _fault(chain: Sequence[Link]) -> str:
    """Why steps cannot become one op; empty if they can."""
    steps = [link.step for link in chain]
    states = {step.h for step in steps}
    after = descendants(states) | states
    for link in chain:
        for node in given_of(link):
            if node in after:
                return f"the input of a step depends on a state before it: {info(node).source}"
    if len({tensor_spec(step.h).shape for step in steps}) > 1:
        return "its states differ in shape"
    nodes = states.union(*([link.before, *given_of(link)] for link in chain))
    nodes |= {c.node for step in steps if (c := step.c_before) is not None}
    if len({tensor_spec(node).dtype for node in nodes}) > 1:
        return "its states, inputs and weights differ in type"
    inside = [inner_nodes(link) for link in chain]
    inside.append(set())
    for place, step in enumerate(steps):
        results = {step.h, step.c} if place + 1 == len(steps) else {step.h}
        for node in inside[place] - results:
            for user in node.users:
                if user not in inside[place] | inside[place + 1] and _lives(user):
                    what = "the cell state" if node is step.c else "a gate"
                    return f"{what} of a step is used outside: {info(user).source}"
    return ""


def _lives(node: fx.Node) -> bool:
    return bool(node.users) or node.op == "output"
