"""Layers of nn.LSTM and its kin: one aten op becomes an op per layer and direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpar.codegen.sparse_rnn import recurrence as recurrence  # defines the op
from graphpar.codegen.sparse_rnn.decide import CpuModel, Decision, decide
from graphpar.interpret import StateValues
from graphpar.passes.lower_recurrences.emit import Emitter
from graphpar.program import is_getitem, tensor_spec

aten = torch.ops.aten
CELLS: Mapping[Any, str] = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "rnn_tanh",
    aten.rnn_relu.input: "rnn_relu",
}
PACKED = (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)


class Layers:
    """One recurrence node, and what replaces it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, *, strict: bool = False) -> None:
        self.graph, self.node = graph, node
        self.emit = Emitter(graph, node, strict=strict)
        self.cell = CELLS[node.target]
        x, state, params, biases, layers, p, train, both, batch_first = node.args
        self.x: Any = x
        self.states: list[Any] = list(state) if self.cell == "lstm" else [state]  # type: ignore[arg-type]
        self.layers, self.directions = int(layers), 2 if both else 1  # type: ignore[arg-type]
        self.p: float = p if train else 0.0  # type: ignore[assignment]
        self.train, self.has_biases, self.batch_first = train, bool(biases), bool(batch_first)
        self.params: Sequence[Any] = params  # type: ignore[assignment]

    def parts(self, place: int) -> tuple[Any, Any, Any, Any, Any]:
        """W_ih, W_hh, b_ih, b_hh, W_hr of a layer and direction."""
        each = len(self.params) // (self.layers * self.directions)
        own = list(self.params[place * each : (place + 1) * each])
        biases = own[2:4] if self.has_biases else [None, None]
        projection = own[-1] if each % 2 else None
        return own[0], own[1], biases[0], biases[1], projection

    def decide(self, mode: bool | str, model: CpuModel, known: StateValues) -> dict[str, Decision]:
        """What becomes of each layer and direction, by name, in order."""
        chosen = {}
        spec = tensor_spec(self.x)
        trains = any(tensor_spec(n).differentiable for n in self.node.all_input_nodes)
        for place in range(self.layers * self.directions):
            layer, direction = divmod(place, self.directions)
            name = f"layer {layer}" + (" reverse" if direction else "")
            if len(spec.shape) != 3 or 0 in spec.shape or not spec.dtype.is_floating_point:
                chosen[name] = Decision(False, f"an input of {spec.dtype}{list(spec.shape)}")
                continue
            steps, batch, _ = spec.shape
            if self.batch_first:
                steps, batch = batch, steps
            chosen[name] = decide(
                self.cell,
                known.of(self.parts(place)[1]),
                steps=steps,
                batch=batch,
                dtype=spec.dtype,
                device=spec.device,
                mode=mode,
                model=model,
                trains=trains,
            )
        return chosen

    def run(self, decisions: Sequence[Decision]) -> None:
        """Replace the node, by a decision for each layer and direction."""
        lasts: list[list[fx.Node]] = [[] for _ in self.states]
        with self.graph.inserting_before(self.node):
            x = self.emit(aten.transpose.int, self.x, 0, 1) if self.batch_first else self.x
            for layer in range(self.layers):
                outs = []
                for direction in range(self.directions):
                    place = layer * self.directions + direction
                    run = self._sparse if decisions[place].lowered else self._dense
                    first = [self.emit(aten.select.int, s, 0, place) for s in self.states]
                    out, *last = run(x, first, place, bool(direction))
                    outs.append(out)
                    for kept, value in zip(lasts, last, strict=True):
                        kept.append(value)
                x = outs[0] if len(outs) == 1 else self.emit(aten.cat.default, outs, -1)
                if self.p and layer + 1 < self.layers:
                    x = self.emit(aten.dropout.default, x, self.p, True)
            if self.batch_first:
                x = self.emit(aten.transpose.int, x, 0, 1)
            results = [x, *(self.emit(aten.stack.default, values) for values in lasts)]
        for user in list(self.node.users):
            assert is_getitem(user)
            value = results[int(user.args[1])]  # type: ignore[arg-type]
            user.replace_all_uses_with(value)
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)
        for value in reversed(results):
            if not value.users:
                self.graph.erase_node(value)

    def _sparse(self, x: fx.Node, first: list[fx.Node], place: int, reverse: bool) -> list[fx.Node]:
        w_ih, w_hh, b_ih, b_hh, w_hr = self.parts(place)
        gates = self.emit(aten.linear.default, x, w_ih, *([b_ih] if b_ih is not None else []))
        return self.emit.sparse(gates, w_hh, b_hh, w_hr, first, self.cell, reverse)

    def _dense(self, x: fx.Node, first: list[fx.Node], place: int, reverse: bool) -> list[fx.Node]:
        """The layer and direction as an op of its own; the other direction reads flipped time."""
        states = [self.emit(aten.unsqueeze.default, s, 0) for s in first]
        params = [p for p in self.parts(place) if p is not None]
        x = self.emit(aten.flip.default, x, [0]) if reverse else x
        given = states if self.cell == "lstm" else states[0]
        args = (x, given, params, self.has_biases, 1, 0.0, self.train, False, False)
        value = self.emit(self.node.target, *args)
        out, *last = (self.emit.item(value, i) for i in range(len(first) + 1))
        if reverse:
            out = self.emit(aten.flip.default, out, [0])
        return [out, *(self.emit(aten.select.int, s, 0, 0) for s in last)]
