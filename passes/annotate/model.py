"""The integer program of annotate-partitions.

Binaries: one per (node, strategy), one per (value, source type, wanted type). With ``made`` the
strategies that give a value a type, ``need`` a user's strategies that want it::

    sum of a node's strategies = 1
    sum of need(user, value, type) <= made(value, type) + sum of conversions to type
    conversion(value, source, type) <= made(value, source)

so that one conversion serves all users of a value. The relaxation is nearly integral.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from graphpar.axes import Axis, OpAxes
from graphpar.cost import CostModel, is_contraction
from graphpar.passes.annotate.candidates import Candidates, axes_in
from graphpar.passes.annotate.milp import Expression, Milp
from graphpar.passes.annotate.price import flops_of, strategy_us
from graphpar.passes.rules import (
    ALONG_WEIGHTS,
    Strategy,
    partial_strategies,
    shard_strategy,
    tensor_arguments,
)
from graphpar.passes.rules.strategy import uniform
from graphpar.program import (
    Program,
    TensorSpec,
    annotate,
    flat_nodes,
    info,
    is_getitem,
    output_node,
    outputs,
    placeholders,
    tensor_spec,
)
from graphpar.types import I, P, R, Shard, Type, convertible, units_for

MUST_SHARD_SHARE = 1e-3
_PER_CONVERSION_US = 1e-3


@dataclass(slots=True)
class _Value:
    """A tensor value: how often it exists, and the binaries that give it each type."""

    spec: TensorSpec
    count: int
    is_state: bool = False
    made: dict[Type, Expression] = field(default_factory=dict)
    needs: dict[Type, list[Expression]] = field(default_factory=lambda: defaultdict(list))


class Model:
    """Builds, solves and writes back; ``sharded`` tells whether any op runs on shards."""

    def __init__(
        self,
        program: Program,
        candidates: Candidates,
        ranks: int,
        cost: CostModel,
        state_types: Mapping[str, Type],
    ) -> None:
        self.state_types = state_types
        self.program, self.candidates, self.ranks, self.cost = program, candidates, ranks, cost
        self.milp = Milp()
        self.values: dict[Hashable, _Value] = {}
        self.strategies: dict[fx.Node, list[tuple[Strategy, int]]] = {}
        self.typed: dict[fx.Node, dict[Type, int]] = {}
        self.results: dict[tuple[str, int], dict[Type, int]] = {}
        self.aliases: dict[str, fx.Node] = {}
        self.sharded = False
        self.flops = {n: flops_of(n) for _, g in program.graphs() for n in g.nodes}
        self.total = sum(
            program.call_count(b) * self.flops[n] for b, g in program.graphs() for n in g.nodes
        )
        for block, graph in program.graphs():
            self._graph(block, graph)
        self._ties()
        for value in self.values.values():
            self._conversions(value)

    # --- values and demands ---

    def _key(self, node: fx.Node) -> Hashable:
        """Equal results of equal calls with equal users are one value."""
        if is_getitem(node):
            call = node.args[0]
            assert isinstance(call, fx.Node)
            if call.op == "call_module":
                users = frozenset(self._user(u, node) for u in node.users)
                return self.program.calls[str(call.target)], node.args[1], users
        return node

    def _user(self, user: fx.Node, value: fx.Node) -> Hashable:
        if user.op == "call_module":
            places = [i for i, a in enumerate(user.args) if a is value]
            return self.program.calls[str(user.target)], tuple(places)
        return user

    def _value(self, node: fx.Node, count: int, *, is_state: bool = False) -> _Value:
        return self.values.setdefault(
            self._key(node), _Value(tensor_spec(node), count, is_state=is_state)
        )

    def _need(self, node: fx.Node, needs: dict[Type, Expression]) -> None:
        value = self.values[self._key(node)]
        for kind, expression in needs.items():
            value.needs[kind].append(expression)

    # --- nodes ---

    def _graph(self, block: str, graph: fx.Graph) -> None:
        count = self.program.call_count(block)
        shared: dict[Hashable, int] = defaultdict(int)
        for node in graph.nodes:
            if is_getitem(node):
                shared[self._key(node)] += 1
        for node in graph.nodes:
            if node.op == "placeholder":
                self._choose(node, self._entry_types(node, block), count)
            elif node.op == "get_attr":
                self._state(node, block, count)
            elif node.op == "call_module":
                self._call(node)
            elif is_getitem(node):
                self._item(node, count * (1 if block else shared[self._key(node)]))
            elif node.op == "call_function":
                self._op(node, count)
            else:
                self._outputs(block, graph)

    def _choose(
        self, node: fx.Node, types: Iterable[Type], count: int, *, is_state: bool = False
    ) -> None:
        choice = {kind: self.milp.binary() for kind in dict.fromkeys(types)}
        self.milp.exactly_one(choice.values())
        self.typed[node] = choice
        value = self._value(node, count, is_state=is_state)
        value.made = {kind: {x: 1.0} for kind, x in choice.items()}

    def _shards(self, node: fx.Node, axes: frozenset[Axis]) -> list[Shard]:
        """The Shard types of a value along each of the axes that it has."""
        dims = info(node).dims
        assert dims is not None
        op = OpAxes((), (dims,))  # type: ignore[arg-type]
        found = []
        for axis in sorted(set(axes_in(dims)) & axes, key=lambda a: a.id):  # type: ignore[arg-type]
            strategy = self._along(op, axis)
            if strategy is not None and isinstance(strategy.results[0], Shard):
                found.append(strategy.results[0])
        return found

    def _entry_types(self, node: fx.Node, block: str) -> list[Type]:
        if not block:
            return [I] if tensor_spec(node).differentiable else [I, R]
        axes = self.candidates.features | self.candidates.tokens
        return self._residual_types(node) or [I, R, *self._shards(node, axes)]

    def _state(self, node: fx.Node, block: str, count: int) -> None:
        name = self.program.state_name(block, node)
        state = self.program.state[name]
        types: list[Type] = [I]
        if state.kind == "parameter":
            types += self._shards(node, self.candidates.features)
        elif not state.spec.differentiable:
            types.append(R)
        if name in self.state_types:
            types = [self.state_types[name]]
        self._choose(node, types, count, is_state=True)

    def _call(self, node: fx.Node) -> None:
        graph = self.program.blocks[self.program.calls[str(node.target)]]
        for argument, entry in zip(flat_nodes(node.args), placeholders(graph), strict=True):
            self._need(argument, {k: {x: 1.0} for k, x in self.typed[entry].items()})

    def _item(self, node: fx.Node, count: int) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        value = self._value(node, count)
        if source.op == "call_module":
            result = self.results[self.program.calls[str(source.target)], index]
            value.made = {kind: {x: 1.0} for kind, x in result.items()}
        else:
            place = tensor_results(source).index(index)
            value.made = self._made(self.strategies[source], place)

    @staticmethod
    def _made(strategies: list[tuple[Strategy, int]], place: int) -> dict[Type, Expression]:
        made: dict[Type, Expression] = defaultdict(dict)
        for strategy, x in strategies:
            made[strategy.results[place]][x] = 1.0
        return dict(made)

    def _op(self, node: fx.Node, count: int) -> None:
        operands = tensor_arguments(node)
        chosen = []
        for strategy in self._op_strategies(node, operands):
            us = strategy_us(node, operands, strategy, self.flops[node], self.cost, self.ranks)
            x = self.milp.binary(count * us)
            chosen.append((strategy, x))
        self.milp.exactly_one(x for _, x in chosen)
        self.strategies[node] = chosen
        for operand in dict.fromkeys(operands):
            place = operands.index(operand)
            needs: dict[Type, Expression] = defaultdict(dict)
            for strategy, x in chosen:
                needs[strategy.operands[place]][x] = 1.0
            self._need(operand, needs)
        if isinstance(info(node).spec, TensorSpec):
            self._value(node, count).made = self._made(chosen, 0)

    def _op_strategies(self, node: fx.Node, operands: list[fx.Node]) -> list[Strategy]:
        op = info(node).axes
        assert op is not None
        product = is_contraction(node.target)
        axes = self.candidates.features | (frozenset() if product else self.candidates.tokens)
        present = {a for dims in (*op.operands, *op.results) for a in axes_in(dims)}
        sharded = self._sharded(op, operands, present & axes)
        if product:
            along_weights = present & axes & self.candidates.parameters
            sharded = self._sharded(op, operands, along_weights) or sharded
        must = (
            product
            and sharded
            and self.flops[node] * self.program.call_count(self._block_of(node))
            >= MUST_SHARD_SHARE * self.total
        )
        taken = self._sharded(op, operands, self._along_weights(node, op))
        if must or taken:
            return taken or sharded
        through = [s for s in partial_strategies(op) if consistent(s, operands)]
        return [uniform(op, I), uniform(op, R), *sharded, *through]

    def _along_weights(self, node: fx.Node, op: OpAxes) -> set[Axis]:
        """The weight axes, such as the vocabulary, that the op must run on shards of."""
        if node.target not in ALONG_WEIGHTS:
            return set()
        taken = op.contracted | op.reduced
        return set(taken & self.candidates.weights & self.candidates.features)

    def _sharded(self, op: OpAxes, operands: list[fx.Node], axes: Iterable[Axis]) -> list[Strategy]:
        found = [self._along(op, axis) for axis in sorted(axes, key=lambda a: a.id)]
        return list(dict.fromkeys(s for s in found if s and consistent(s, operands)))

    def _along(self, op: OpAxes, axis: Axis) -> Strategy | None:
        """The op with one axis cut, as evenly as can be."""
        units = units_for(axis.size, self.ranks)
        return shard_strategy(op, {axis: (axis.size,)}, self.ranks, units)

    def _block_of(self, node: fx.Node) -> str:
        return next(name for name, graph in self.program.graphs() if graph is node.graph)

    def _outputs(self, block: str, graph: fx.Graph) -> None:
        if not block:
            for node in dict.fromkeys(flat_nodes(outputs(graph))):
                self._need(node, {I: {}})
            return
        for position, node in enumerate(flat_nodes(outputs(graph))):
            value = self.values[self._key(node)]
            types = self._residual_types(node) or dict.fromkeys([*value.made, I])
            choice = {kind: self.milp.binary() for kind in types}
            self.milp.exactly_one(choice.values())
            self.results[block, position] = choice
            self._need(node, {kind: {x: 1.0} for kind, x in choice.items()})

    def _residual_types(self, node: fx.Node) -> list[Type] | None:
        """The one type of the residual stream; ``None`` for other values."""
        if node not in self.candidates.residual:
            return None
        axis = self.candidates.residual[node]
        return [I] if axis is None else list(self._shards(node, frozenset({axis})))

    def _ties(self) -> None:
        """Nodes that read the same state have one type."""
        first: dict[str, fx.Node] = {}
        for block, graph in self.program.graphs():
            for node in graph.nodes:
                if node.op == "get_attr":
                    for name in self.program.state_names(block, node):
                        other = first.setdefault(name, node)
                        if other is not node:
                            self._equal(other, node)

    def _equal(self, a: fx.Node, b: fx.Node) -> None:
        for kind in {**self.typed[a], **self.typed[b]}:
            x, y = self.typed[a].get(kind), self.typed[b].get(kind)
            row = {k: s for k, s in ((x, 1.0), (y, -1.0)) if k is not None}
            self.milp.add(row, 0, 0)

    def _conversions(self, value: _Value) -> None:
        cost = replace(self.cost, latency_us=0.0) if value.is_state else self.cost
        for kind, users in value.needs.items():
            available = dict(value.made.get(kind, {}))
            for source, made in value.made.items():
                if kind == P or not convertible(source, kind):
                    continue
                us = _PER_CONVERSION_US + cost.conversion_us(
                    source,
                    kind,
                    value.spec.nbytes,
                    self.ranks,
                    differentiable=value.spec.differentiable,
                )
                us *= 1 + 1e-4 * (len(blocks_of(source)) + len(blocks_of(kind)))
                z = self.milp.binary(value.count * us)
                self.milp.add({z: 1.0, **dict.fromkeys(made, -1.0)}, -math.inf, 0)
                available[z] = 1.0
            for need in users:
                row = {x: -s for x, s in available.items()}
                for x, s in need.items():
                    row[x] = row.get(x, 0.0) + s
                self.milp.add(row, -math.inf, 0 if need else -1)

    # --- solution ---

    def solve(self) -> dict[str, Any]:
        """Solve, write types and operand types on the nodes; returns the report."""
        report = self.milp.solve()
        for node, choice in self.typed.items():
            annotate(node, type=self._picked(choice.items()))
        for node, strategies in self.strategies.items():
            strategy = self._picked(strategies)
            self.sharded |= any(isinstance(t, Shard) for t in strategy.operands)
            spec = info(node).spec
            kind: Any = strategy.results[0]
            if not isinstance(spec, TensorSpec):
                rest = iter(strategy.results)
                kind = tuple(next(rest) if s else I for s in spec or ())
            annotate(node, type=kind, operands=strategy.operands)
        for block, graph in self.program.graphs():
            exits = flat_nodes(outputs(graph))
            wanted: list[Type] = [
                self._picked(self.results[block, i].items()) if block else I
                for i in range(len(exits))
            ]
            annotate(output_node(graph), operands=tuple(wanted))
        for node in self.program.graph.nodes:
            if node.op == "call_module":
                graph = self.program.blocks[self.program.calls[str(node.target)]]
                entries = tuple(info(n).type for n in placeholders(graph))
                annotate(node, type=info(output_node(graph)).operands, operands=entries)
        for _, graph in self.program.graphs():
            for node in graph.nodes:
                if is_getitem(node):
                    source, index = node.args
                    annotate(node, type=info(source).type[index])  # type: ignore[index]
        return report

    def _picked(self, choice: Iterable[tuple[Any, Any]]) -> Any:
        """The alternative whose binary is 1, in (alternative, binary) pairs."""
        return next(alternative for alternative, x in choice if self.milp.value(x))


def blocks_of(kind: Type) -> tuple[int, ...]:
    return kind.blocks[1:] if isinstance(kind, Shard) else ()


def consistent(strategy: Strategy, operands: list[fx.Node]) -> bool:
    """Whether an operand that stands twice gets one type."""
    seen: dict[fx.Node, Type] = {}
    return all(
        seen.setdefault(node, kind) == kind
        for node, kind in zip(operands, strategy.operands, strict=True)
    )


def tensor_results(node: fx.Node) -> list[int]:
    """The places of tensors in a tuple-valued node."""
    spec = info(node).spec
    assert isinstance(spec, tuple)
    return [i for i, s in enumerate(spec) if s is not None]
