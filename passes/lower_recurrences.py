"""lower_recurrences: layers of nn.LSTM and its kin become ``sparse_rnn`` where that is faster."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar.codegen.sparse_rnn import recurrence as recurrence  # defines the op
from graphpar.codegen.sparse_rnn.decide import CpuModel, Decision, decide
from graphpar.errors import InputError
from graphpar.interpret import StateValues
from graphpar.program import (
    Program,
    copy_graph,
    derive,
    info,
    is_getitem,
    spec_of,
    tensor_spec,
)

NAME = "lower-recurrences"
MODES = (True, False, "auto")
aten = torch.ops.aten
_CELLS: Mapping[Any, str] = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "rnn_tanh",
    aten.rnn_relu.input: "rnn_relu",
}
_PACKED = (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerRecurrences:
    """``sparse_rnn``: "auto", what the cost model calls faster; True, all that can be; False.

    ``weights``: values of state by canonical names, to measure densities; those that are missing,
    or on the meta device, are unknown. ``model``: of the time on a CPU.
    """

    sparse_rnn: bool | str = "auto"
    weights: Mapping[str, Tensor] | None = None
    model: CpuModel = field(default_factory=CpuModel)


def lower_recurrences(program: Program, options: LowerRecurrences = LowerRecurrences()) -> Program:
    """Rewrite recurrences into one op per layer and direction (Zhu et al. 2018, section 2).

    The input's product with all timesteps at once stands outside, dropout between layers is a
    dropout of its own, layers that stay dense are an aten op each. What was decided for each
    layer and direction, and why, is ``report["sparse_rnn"]``.
    Needs: a flat program. Ensures: no op of a recurrence that has a layer to lower.
    Numerics: reassociates.
    """
    if options.sparse_rnn not in MODES:
        known = ", ".join(map(repr, MODES))
        raise InputError(f"sparse_rnn must be one of {known}, not {options.sparse_rnn!r}")
    found = [n for n in program.graph.nodes if n.target in _CELLS or n.target in _PACKED]
    if not found:
        return program
    graph, nodes = copy_graph(program.graph)
    decisions: dict[str, Decision] = {}
    changed = False
    for old in found:
        name = _unique(info(old).source.module or _CELLS.get(old.target, "recurrence"), decisions)
        if old.target in _PACKED:
            decisions[name] = Decision(False, "packed sequences stay as they are")
            continue
        rewrite = _Rewrite(program, graph, nodes[old])
        chosen = rewrite.decide(options, old)
        decisions |= {f"{name} {part}": each for part, each in chosen.items()}
        if any(each.lowered for each in chosen.values()):
            rewrite.run(list(chosen.values()))
            changed = True
    report = {**program.report, "sparse_rnn": decisions}
    return program.with_graphs({"": graph} if changed else {}, report=report)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, numbered if it is a prefix in ``taken`` (a module that is called again)."""
    number, found = 2, name
    while any(key == found or key.startswith(f"{found} ") for key in taken):
        number, found = number + 1, f"{name}@{number}"
    return found


class _Rewrite:
    """One recurrence node, and what replaces it."""

    def __init__(self, program: Program, graph: fx.Graph, node: fx.Node) -> None:
        self.program, self.graph, self.node = program, graph, node
        self.cell = _CELLS[node.target]
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

    def decide(self, options: LowerRecurrences, old: fx.Node) -> dict[str, Decision]:
        chosen = {}
        spec = tensor_spec(self.x)
        old_params: Sequence[Any] = old.args[2]  # type: ignore[assignment]
        each = len(old_params) // (self.layers * self.directions)
        known = StateValues(self.program, options.weights or {})
        for place in range(self.layers * self.directions):
            layer, direction = divmod(place, self.directions)
            name = f"layer {layer}" + (" reverse" if direction else "")
            if len(spec.shape) != 3 or 0 in spec.shape or not spec.dtype.is_floating_point:
                chosen[name] = Decision(False, f"an input of {spec.dtype}{list(spec.shape)}")
                continue
            steps, batch, _ = spec.shape
            if self.batch_first:
                steps, batch = batch, steps
            weight = known.of(old_params[place * each + 1])
            chosen[name] = decide(
                self.cell,
                weight,
                steps=steps,
                batch=batch,
                dtype=spec.dtype,
                device=spec.device,
                mode=options.sparse_rnn,
                model=options.model,
            )
        return chosen

    # --- rewriting ---

    def emit(self, target: Any, *args: Any) -> fx.Node:
        spec, name = _result(target, args), target.__name__.split(".")[0]
        return derive(self.graph, target, args, like=self.node, origin=NAME, spec=spec, name=name)

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self.emit(operator.getitem, value, index)

    def run(self, decisions: Sequence[Decision]) -> None:
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
        c = first[1] if len(first) > 1 else None
        op = torch.ops.graphpar_rnn.sparse_rnn.default
        value = self.emit(op, gates, w_hh, b_hh, w_hr, first[0], c, self.cell, reverse)
        return [self.item(value, i) for i in range(len(first) + 1)]

    def _dense(self, x: fx.Node, first: list[fx.Node], place: int, reverse: bool) -> list[fx.Node]:
        """The layer and direction as an op of its own; the other direction reads flipped time."""
        states = [self.emit(aten.unsqueeze.default, s, 0) for s in first]
        params = [p for p in self.parts(place) if p is not None]
        x = self.emit(aten.flip.default, x, [0]) if reverse else x
        given = states if self.cell == "lstm" else states[0]
        args = (x, given, params, self.has_biases, 1, 0.0, self.train, False, False)
        value = self.emit(self.node.target, *args)
        out, *last = (self.item(value, i) for i in range(len(first) + 1))
        if reverse:
            out = self.emit(aten.flip.default, out, [0])
        return [out, *(self.emit(aten.select.int, s, 0, 0) for s in last)]


def _result(target: Any, args: tuple[Any, ...]) -> Any:
    """The spec of what an op gives on tensors of its arguments' specs."""
    if target is operator.getitem:
        return info(args[0]).spec[args[1]]  # type: ignore[index]

    def tensor(node: fx.Node) -> Tensor:
        spec = tensor_spec(node)
        return torch.empty(
            spec.shape, dtype=spec.dtype, device=spec.device, requires_grad=spec.differentiable
        )

    with FakeTensorMode(), torch.enable_grad():
        found = target(*fx.node.map_arg(args, tensor))
    if isinstance(found, Tensor):
        return spec_of(found, differentiable=found.requires_grad)
    return tuple(spec_of(v, differentiable=v.requires_grad) for v in found)
