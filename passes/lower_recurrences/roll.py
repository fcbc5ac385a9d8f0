"""Roll a loop up: the inputs of all steps at once, the op, and what reads its states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.decide import CpuModel, Decision, decide
from graphpar.interpret import StateValues
from graphpar.passes.lower_recurrences.emit import Emitter
from graphpar.passes.lower_recurrences.forms import Product
from graphpar.passes.lower_recurrences.loops import Loop, inner_nodes, is_random
from graphpar.passes.lower_recurrences.order import ordered_nodes, reorder
from graphpar.passes.lower_recurrences.pieces import Piece, shape_of, width_of
from graphpar.passes.lower_recurrences.terms import terms_of
from graphpar.passes.lower_recurrences.times import run_of, stacks_of
from graphpar.program import is_getitem, tensor_spec

aten = torch.ops.aten


def roll(
    graph: fx.Graph,
    loop: Loop,
    known: StateValues,
    *,
    mode: bool | str,
    model: CpuModel,
    draws_in_order: bool,
) -> tuple[Decision, list[fx.Node]]:
    """Make an op of a loop, in place, if it can be one and that is faster; returns it too."""
    if loop.fault:
        return Decision(False, loop.fault), []
    rolled = _Roll(graph, loop, strict=mode is True)
    fault = rolled.fault()
    if not fault and draws_in_order and rolled.draws_move():
        fault = "it would draw random numbers in another order"
    if fault:
        return Decision(False, fault), []
    with graph.inserting_before(loop.last.h):
        weight = rolled.weight()
        spec = tensor_spec(loop.last.h)
        decision = decide(
            loop.cell,
            known.of(weight),
            steps=len(loop.links),
            batch=spec.shape[0],
            dtype=spec.dtype,
            device=spec.device,
            mode=mode,
            model=model,
            trains=spec.differentiable,
        )
        if decision.lowered:
            rolled.run(weight)
    rolled.emit.discard()
    if decision.lowered:
        reorder(graph)
    return decision, rolled.emit.ops


class _Roll:
    def __init__(self, graph: fx.Graph, loop: Loop, *, strict: bool) -> None:
        self.graph, self.loop = graph, loop
        self.emit = Emitter(graph, loop.last.h, strict=strict)
        self.gates = cell_of(loop.cell).gates
        self.batch, self.hidden = shape_of(loop.last.h)
        self.terms = [terms_of(link, loop.values) for link in loop.links]
        self.reverse = any(self._runs_back(place) for place in range(len(self.terms[0])))

    def fault(self) -> str:
        keys = {tuple(term.key(self.loop.values) for term in terms) for terms in self.terms}
        if len(keys) > 1:
            return "its steps take inputs of different forms"
        if any(term.inner and term.kind != "bias" for term in self.terms[0]):
            return "the reset gate multiplies an input"
        return ""

    def draws_move(self) -> bool:
        """Whether random numbers would be drawn in another order."""
        states = {*(link.step.h for link in self.loop.links), self.loop.last.c}
        given = [n for terms in self.terms for t in terms if t.kind != "bias" for n in t.nodes]
        nodes = list(self.graph.nodes)
        places = {node: place for place, node in enumerate(nodes)}

        def inputs(node: fx.Node) -> Iterable[fx.Node]:
            return given if node in states else node.all_input_nodes

        def place(node: fx.Node) -> int:
            return places[self.loop.last.h if node in states else node]

        drawn = [n for n in nodes if is_random(n)]
        return [n for n in ordered_nodes(nodes, inputs, place) if is_random(n)] != drawn

    def _runs_back(self, place: int) -> bool:
        """Whether the inputs of a term are those of a sequence, from the last to the first."""
        term = self.terms[0][place]
        if term.kind == "bias" or len({len(terms) for terms in self.terms}) > 1:
            return False
        run = run_of([terms[place].x for terms in self.terms])
        return run is not None and run[3] < 0

    # --- what the op takes ---

    def weight(self) -> fx.Node:
        return self._matrix(self.loop.links[0].recurrent)

    def run(self, weight: fx.Node) -> None:
        link = self.loop.links[0]
        bias = self._bias(inner=True)
        size = [self.batch, self.hidden]
        states = [self._expanded(link.before, size)]
        if link.step.c_before is not None:
            states.append(self._expanded(self._cut(link.step.c_before, -1), size))
        gates = self._inputs(states[0])
        results = self.emit.sparse(gates, weight, bias, None, states, self.loop.cell, self.reverse)
        self._replace(results)

    def _in_time(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return list(nodes[::-1] if self.reverse else nodes)

    def _inputs(self, state: fx.Node) -> fx.Node:
        """The gates' input part [T, B, G * H]."""
        total, bias = None, self._bias(inner=False)
        for place, term in enumerate(self.terms[0]):
            if term.kind == "product":
                steps = self._gather([terms[place].x for terms in self.terms])
                matrix = self._matrix(term.pieces)
                given = () if bias is None else (bias,)
                value, bias = self.emit(aten.linear.default, steps, matrix, *given), None
            elif term.kind == "input":
                value = self._input(place)
            else:
                continue
            total = value if total is None else self.emit(aten.add.Tensor, total, value)
        if bias is not None:
            total = bias if total is None else self.emit(aten.add.Tensor, total, bias)
        shape = [len(self.loop.links), self.batch, self.gates * self.hidden]
        if total is None:
            return self.emit(aten.new_zeros.default, state, shape)
        return self._expanded(total, shape)

    def _input(self, place: int) -> fx.Node:
        """Inputs that are no product seen here, cut and put together for the gates."""
        first = self.terms[0][place]
        gathered = [
            self._gather([terms[place].nodes[i] for terms in self.terms])
            for i in range(len(first.nodes))
        ]
        pieces = [
            None if p is None else Piece(gathered[first.nodes.index(p.node)], p.start, p.size)
            for p in first.pieces
            if not isinstance(p, Product)
        ]
        return self._joined(pieces, -1)

    def _bias(self, *, inner: bool) -> fx.Node | None:
        total = None
        for term in self.terms[0]:
            if term.kind == "bias" and term.inner == inner:
                pieces = [p for p in term.pieces if not isinstance(p, Product)]
                value = self._joined(pieces, 0)
                total = value if total is None else self.emit(aten.add.Tensor, total, value)
        return total

    def _matrix(self, pieces: Sequence[Piece | Product | None]) -> fx.Node:
        """The matrix [G * H, inputs] of products with one operand."""
        known: dict[tuple[fx.Node, bool, int, int], fx.Node] = {}
        rows: list[Piece | None] = []
        for each in pieces:
            if not isinstance(each, Product):
                rows.append(None)
                continue
            key = each.weight, each.turned, each.first, each.count
            if key not in known:
                matrix = each.weight
                if not each.turned:
                    matrix = self.emit(aten.t.default, matrix)
                if each.count != width_of(matrix):
                    matrix = self.emit(
                        aten.slice.Tensor, matrix, 1, each.first, each.first + each.count
                    )
                known[key] = matrix
            rows.append(Piece(known[key], each.start, each.size))
        return self._joined(rows, 0)

    def _joined(self, pieces: Sequence[Piece | None], dim: int) -> fx.Node:
        """Pieces along a dimension, one for each gate, zeros where one has none."""
        given = [p for p in pieces if p is not None]
        first = given[0].node
        whole_size = shape_of(first)[dim] == self.gates * self.hidden
        negated = self.loop.last.negated
        if (
            whole_size
            and negated is None
            and all(
                p is not None and p.node is first and p.start == gate * self.hidden
                for gate, p in enumerate(pieces)
            )
        ):
            return first
        parts = []
        for gate, each in enumerate(pieces):
            if each is None:
                shape = list(shape_of(first))
                shape[dim] = self.hidden
                part = self.emit(aten.new_zeros.default, first, shape)
            else:
                part = self._cut(each, dim)
            parts.append(self.emit(aten.neg.default, part) if gate == negated else part)
        return parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, dim)

    def _cut(self, piece: Piece, dim: int) -> fx.Node:
        if piece.size == shape_of(piece.node)[dim]:
            return piece.node
        end = piece.start + piece.size
        return self.emit(aten.slice.Tensor, piece.node, dim, piece.start, end)

    def _expanded(self, value: fx.Node, shape: list[int]) -> fx.Node:
        if list(shape_of(value)) == shape:
            return value
        return self.emit(aten.expand.default, value, shape)

    def _gather(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Values of all steps as one, in order of time."""
        nodes = self._in_time(nodes)
        if all(node is nodes[0] for node in nodes):
            return self.emit(aten.unsqueeze.default, nodes[0], 0)
        run = run_of(nodes)
        if run is None or run[3] < 0:
            return self.emit(aten.stack.default, nodes)
        value, dim, first, _ = run
        if dim:
            order = [dim, *(d for d in range(len(shape_of(value))) if d != dim)]
            value = self.emit(aten.permute.default, value, order)
        if shape_of(value)[0] != len(nodes):
            value = self.emit(aten.slice.Tensor, value, 0, first, first + len(nodes))
        return value

    # --- what reads its states ---

    def _replace(self, results: Sequence[fx.Node]) -> None:
        out, _, *last_c = results
        loop, inside = self.loop, set[fx.Node]()
        for link in loop.links:
            inside |= inner_nodes(link)
        states = self._in_time([link.step.h for link in loop.links])
        for stack, dim in list(stacks_of(states)):
            self._replace_stack(stack, dim % 3, out)

        def outside(user: fx.Node) -> bool:
            return user not in inside

        for place, h in enumerate(states):
            if any(map(outside, h.users)):
                value = self.emit(aten.select.int, out, 0, place)
                h.replace_all_uses_with(value, delete_user_cb=outside)
        if loop.last.c is not None:
            loop.last.c.replace_all_uses_with(last_c[0], delete_user_cb=outside)
        self._erase([*states, *([loop.last.c] if loop.last.c is not None else [])])

    def _replace_stack(self, stack: fx.Node, dim: int, out: fx.Node) -> None:
        if dim:
            order = [1, 0, 2] if dim == 1 else [1, 2, 0]
            out = self.emit(aten.permute.default, out, order)
        stack.replace_all_uses_with(out)
        parts: Any = stack.args[0]
        self.graph.erase_node(stack)
        for part in parts:  # of a cat: rows of a length of 1
            if part.target is aten.unsqueeze.default and not part.users:
                self.graph.erase_node(part)

    def _erase(self, nodes: Sequence[fx.Node]) -> None:
        """Nodes that nothing reads, and what only they read."""
        waiting, erased = list(nodes), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            unused = [u for u in node.users if is_getitem(u) and not u.users]
            if len(unused) < len(node.users) or node in erased:
                continue
            if node.op in ("placeholder", "output") or is_random(node):
                continue
            inputs = node.all_input_nodes
            for each in (*unused, node):
                self.graph.erase_node(each)
            erased |= {node, *unused}
            waiting += inputs
