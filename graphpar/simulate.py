"""simulate: all ranks of a program in this process, on lists of tensors.

Conversions run as one autograd function over all ranks whose backward is that of their types;
every other op runs rank by rank. So a missing conversion shows in the gradients, as it would on
devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ops import is_conversion, signature
from graphpar.ops.reference import on_all_ranks, redistribute
from graphpar.ops.seeded import own_dropout, part_dropout
from graphpar.passes.rules import FORMS, is_form, whole_op
from graphpar.program import Program, is_getitem, of_rank, output_node, placeholders
from graphpar.types import Shard, cut, join, split_layout
from graphpar.unfuse import unfused

aten = torch.ops.aten
_RANDOM = {
    aten.dropout.default,
    aten.alpha_dropout.default,
    aten.feature_dropout.default,
    aten.scaled_dot_product_attention.default,
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
}

_SEEDED = {
    torch.ops.graphpar.seeded_dropout.default,
    torch.ops.graphpar.rank_dropout.default,
}

Ranks = list[Any]
"""One value per rank."""


class Simulation:
    """A local program with every rank's state.

    ``state`` maps canonical names to whole tensors; each rank gets a leaf of its own, cut as the
    program says, that collects its gradient.
    """

    def __init__(self, program: Program, state: Mapping[str, Tensor]) -> None:
        self.program = program = unfused(program)
        self.ranks = program.ranks
        self.state: dict[str, list[Tensor]] = {}
        for name, known in program.state.items():
            whole = program.constants[name] if known.kind == "constant" else state[name]
            self.state[name] = [self._part(whole, known.type, r) for r in range(self.ranks)]
            if known.kind == "parameter" and known.spec.differentiable:
                for part in self.state[name]:
                    part.requires_grad_()

    def _part(self, whole: Tensor, kind: Any, rank: int) -> Tensor:
        whole = whole.detach()
        part = cut(whole, kind, rank, self.ranks) if isinstance(kind, Shard) else whole
        return part.clone(memory_format=torch.contiguous_format)

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter as one device would have it.

        For an Invariant parameter all ranks must agree; the first rank's is returned.
        """
        kind = self.program.state[name].type
        grads = [part.grad for part in self.state[name]]
        present = [g for g in grads if g is not None]
        if not present:
            return None
        if isinstance(kind, Shard):
            parts = self.state[name]
            whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
            return join(whole, kind)
        return present[0]

    def rank_gradients(self, name: str) -> list[Tensor | None]:
        return [part.grad for part in self.state[name]]

    def run(self, leaves: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Run all ranks; ``leaves[r]`` are rank r's flattened arguments. Returns each rank's flat
        outputs, mutated buffers (also stored) left out."""
        inputs = [[leaf[i] for i in self.program.placeholders] for leaf in leaves]
        columns = [list(column) for column in zip(*inputs, strict=True)] if inputs[0] else []
        results = self._graph(self.program.graph, columns, "")
        count = len(results) - len(self.program.mutations)
        for name, value in zip(self.program.mutations, results[count:], strict=True):
            self.state[name] = [part.detach() for part in value]
        return [[value[r] for value in results[:count]] for r in range(self.ranks)]

    def _graph(self, graph: fx.Graph, arguments: Sequence[Ranks], prefix: str) -> list[Ranks]:
        env: dict[fx.Node, Ranks] = dict(zip(placeholders(graph), arguments, strict=True))
        for node in graph.nodes:
            if node.op == "get_attr":
                env[node] = self.state[self.program.canonical(f"{prefix}{node.target}")]
            elif node.op == "call_module":
                block = self.program.blocks[self.program.calls[str(node.target)]]
                inner = self._graph(block, [env[a] for a in node.args], f"{node.target}.")
                env[node] = [list(row) for row in zip(*inner, strict=True)]
            elif node.op == "call_function":
                env[node] = self._op(node, env)
        values = output_node(graph).args[0]
        assert isinstance(values, (list, tuple))
        return [env[v] if isinstance(v, fx.Node) else [v] * self.ranks for v in values]

    def _op(self, node: fx.Node, env: Mapping[fx.Node, Ranks]) -> Ranks:
        if is_getitem(node):
            source, index = node.args
            return [value[index] for value in env[source]]  # type: ignore[index]
        target: Any = node.target
        if is_conversion(target):
            before, after = signature(target, node.args[1:])
            return redistribute(env[node.args[0]], before, after)  # type: ignore[index]
        if target is torch.ops.graphpar.dropout.default:
            return self._dropout(node, env)
        if is_form(target):
            calls = [self._call_of(node, env, rank)[0] for rank in range(self.ranks)]
            return list(on_all_ranks(FORMS[whole_op(target)], calls))
        if target in _SEEDED:
            return self._seeded(node, env)
        results = []
        random = target in _RANDOM or torch.Tag.nondeterministic_seeded in target.tags
        state = torch.get_rng_state() if random else None
        for rank in range(self.ranks):
            if state is not None:
                torch.set_rng_state(state)
            args, kwargs = self._call_of(node, env, rank)
            results.append(target(*args, **kwargs))
        return results

    @staticmethod
    def _call_of(node: fx.Node, env: Mapping[fx.Node, Ranks], rank: int) -> Any:
        """The arguments of one rank."""

        def value(n: fx.Node) -> Any:
            return env[n][rank]

        return fx.node.map_arg(of_rank((node.args, node.kwargs), rank), value)

    def _dropout(self, node: fx.Node, env: Mapping[fx.Node, Ranks]) -> Ranks:
        (x, p, train), kind, _ = split_layout(node.args)
        parts = env[x]
        ones = torch.ones_like(join([part.detach() for part in parts], kind))
        mask = aten.dropout(ones, p, train)
        return [part * cut(mask, kind, rank, self.ranks) for rank, part in enumerate(parts)]

    def _seeded(self, node: fx.Node, env: Mapping[fx.Node, Ranks]) -> Ranks:
        x, seed, p, number, *place = node.args
        assert isinstance(p, float)
        assert isinstance(number, int)
        values = zip(env[x], env[seed], strict=True)  # type: ignore[index]
        if node.target is torch.ops.graphpar.rank_dropout.default:
            return [
                own_dropout(part, own, p, number, rank if place else None)
                for rank, (part, own) in enumerate(values)
            ]
        if not place:
            return [part_dropout(part, own, p, number) for part, own in values]
        _, kind, _ = split_layout(place)
        layout = kind.dim, kind.blocks
        return [
            part_dropout(part, own, p, number, *layout, rank, self.ranks, kind.units)
            for rank, (part, own) in enumerate(values)
        ]


def run_ranks(
    program: Program, state: Mapping[str, Tensor], leaves: Sequence[Any]
) -> tuple[Simulation, list[list[Any]]]:
    """Simulate one call with copies of ``leaves`` on every rank."""
    simulation = Simulation(program, state)
    copies = [[_copy(leaf) for leaf in leaves] for _ in range(program.ranks)]
    return simulation, simulation.run(copies)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf
