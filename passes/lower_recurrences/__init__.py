"""lower_recurrences: nn.LSTM, its kin and unrolled cells become ``sparse_rnn`` where that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from graphpar.codegen.sparse_rnn.decide import CpuModel, Decision
from graphpar.errors import InputError
from graphpar.interpret import StateValues
from graphpar.passes.lower_recurrences.layers import CELLS, PACKED, Layers
from graphpar.passes.lower_recurrences.loops import find_loops
from graphpar.passes.lower_recurrences.roll import roll
from graphpar.passes.lower_recurrences.unrolled import unrolled
from graphpar.program import Program, copy_graph, info

__all__ = ["MODES", "LowerRecurrences", "lower_recurrences"]

MODES = (True, False, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerRecurrences:
    """``sparse_rnn``: "auto", what the cost model calls faster; True, all that can be; False.

    ``weights``: values of state by canonical names, to measure densities; those that are missing,
    or on the meta device, are unknown. ``model``: of the time on a CPU. ``draws_in_order``: leave
    what would draw random numbers in another order.
    """

    sparse_rnn: bool | str = "auto"
    weights: Mapping[str, Tensor] | None = None
    model: CpuModel = field(default_factory=CpuModel)
    draws_in_order: bool = False


def lower_recurrences(program: Program, options: LowerRecurrences = LowerRecurrences()) -> Program:
    """Rewrite recurrences into one op per layer and direction (Zhu et al. 2018, section 2).

    The input's product with all timesteps at once stands outside, dropout between layers is a
    dropout of its own, layers that stay dense are an aten op each. Cells that are called step by
    step are rolled up if each step's state is the one before's and its input no state's. What was
    decided for each layer and direction, and why, is ``report["sparse_rnn"]``.
    Needs: a flat program. Ensures: no op of a recurrence that has a layer to lower.
    Numerics: reassociates.
    """
    if options.sparse_rnn not in MODES:
        known = ", ".join(map(repr, MODES))
        raise InputError(f"sparse_rnn must be one of {known}, not {options.sparse_rnn!r}")
    targets = {node.target for node in program.graph.nodes}
    loops = find_loops(program, program.graph)
    stay = unrolled(program, program.graph, loops)
    if targets.isdisjoint((*CELLS, *PACKED)) and not loops and not stay:
        return program
    graph, _ = copy_graph(program.graph)
    known_values = StateValues(program, options.weights or {})
    found = _Found()
    _lower_layers(graph, known_values, options, found)
    _roll_loops(program, graph, known_values, options, found)
    for name, decision in stay.items():
        found.add(name, {"": decision}, [])
    report = {**program.report, "sparse_rnn": found.in_order(graph)}
    return program.with_graphs({"": graph} if found.ops else {}, report=report)


class _Found:
    """Decisions by name, and the ops of those that are lowered."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self.ops: dict[str, fx.Node] = {}

    def add(self, name: str, parts: Mapping[str, Decision], ops: Sequence[fx.Node]) -> None:
        following, found, number = iter(ops), name, 2
        while any(key == found or key.startswith(f"{found} ") for key in self.decisions):
            number, found = number + 1, f"{name}@{number}"  # a module that is called again
        for part, decision in parts.items():
            key = f"{found} {part}" if part else found
            self.decisions[key] = decision
            if decision.lowered:
                self.ops[key] = next(following)

    def in_order(self, graph: fx.Graph) -> dict[str, Decision]:
        """The decisions, those of ops in the order of the graph."""
        places = {node: place for place, node in enumerate(graph.nodes)}
        lowered = iter(sorted(self.ops, key=lambda name: places[self.ops[name]]))
        names = [next(lowered) if d.lowered else name for name, d in self.decisions.items()]
        return {name: self.decisions[name] for name in names}


def _lower_layers(
    graph: fx.Graph, known: StateValues, options: LowerRecurrences, found: _Found
) -> None:
    for node in [n for n in graph.nodes if n.target in CELLS or n.target in PACKED]:
        name = info(node).source.module or CELLS.get(node.target, "recurrence")
        if node.target in PACKED:
            found.add(name, {"": Decision(False, "packed sequences stay as they are")}, [])
            continue
        layers = Layers(graph, node, strict=options.sparse_rnn is True)
        chosen = layers.decide(options.sparse_rnn, options.model, known)
        if any(each.lowered for each in chosen.values()):
            layers.run(list(chosen.values()))
        found.add(name, chosen, layers.emit.ops)


def _roll_loops(
    program: Program,
    graph: fx.Graph,
    known: StateValues,
    options: LowerRecurrences,
    found: _Found,
) -> None:
    """One loop at a time: where one became an op, others read its result."""
    seen = set[fx.Node]()
    while True:
        loops = find_loops(program, graph)
        loop = next((each for each in loops if each.last.h not in seen), None)
        if loop is None:
            return
        seen.add(loop.last.h)
        decision, ops = roll(
            graph,
            loop,
            known,
            mode=options.sparse_rnn,
            model=options.model,
            draws_in_order=options.draws_in_order,
        )
        found.add(loop.name, {f"{len(loop.links)} steps": decision}, ops)
