"""seed_dropout: dropout with masks that are a function of a seed, drawn once per forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from graphpar.errors import InputError
from graphpar.program import (
    MESH_DIM,
    Info,
    Program,
    TensorSpec,
    annotate,
    copy_graph,
    info,
    placeholders,
    set_info,
)
from graphpar.types import R, Shard, Type, layout_arguments

NAME = "seed-dropout"
SEED_SPEC = TensorSpec((2,), torch.int64, torch.device("cpu"))
aten, ops = torch.ops.aten, torch.ops.graphpar
_OPS = {"invariant": ops.seeded_dropout.default, "per-rank": ops.rank_dropout.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedDropout:
    """``rng``: "invariant", masks that do not depend on the ranks, or "per-rank", masks of
    torch's generator, where a value is sharded each rank its own."""

    rng: Literal["invariant", "per-rank"] = "invariant"


def seed_dropout(program: Program, options: SeedDropout = SeedDropout()) -> Program:
    """Draw a seed in the root, pass it to every block that drops, number dropouts and calls.

    The numbers are those of the order in the graph, which no other pass changes, so they are the
    same for every number of ranks. Needs: plain dropouts; the last pass, or the form "whole".
    Ensures: a mask follows from the seed alone. Numerics: lossy (other masks).
    """
    if options.rng not in _OPS:
        raise InputError(f"rng must be one of {', '.join(map(repr, _OPS))}, not {options.rng!r}")
    target = _OPS[options.rng]
    found = {name: [n for n in graph.nodes if _drops(n)] for name, graph in program.graphs()}
    dropping = {name for name, nodes in found.items() if nodes}
    if not dropping:
        return program
    kind = None if program.form == "whole" else R
    graphs = {}
    for name, graph in program.graphs():
        graphs[name], nodes = copy_graph(graph)
        calls = [
            (number, nodes[node])
            for number, node in enumerate(program.call_nodes() if not name else [], 1)
            if program.calls[str(node.target)] in dropping
        ]
        drops = [nodes[node] for node in found[name]]
        if not drops and not calls:
            continue
        first = min([*drops, *(node for _, node in calls)])
        seed = _received(graphs[name], first, kind) if name else _drawn(graphs[name], first, kind)
        for number, node in enumerate(drops):
            _seed(graphs[name], node, target, seed, number)
        for number, node in calls:
            with graphs[name].inserting_before(node):
                own = _derive(graphs[name], ops.call_seed.default, (seed, number), node, kind)
            node.args = (*node.args, own)
    return program.with_graphs(graphs)


def _drops(node: fx.Node) -> bool:
    """Whether the node is a dropout that draws, of a whole value or of a shard."""
    if node.target not in (aten.dropout.default, ops.dropout.default):
        return False
    p: Any = node.args[1]
    return bool(node.args[2]) and 0 < p < 1


def _derive(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kind: Type | None
) -> fx.Node:
    node = graph.create_node("call_function", target, args, name="seed")
    set_info(node, Info(SEED_SPEC, info(like).source, NAME, type=kind))
    return node


def _drawn(graph: fx.Graph, first: fx.Node, kind: Type | None) -> fx.Node:
    device = next((s.device for s in _specs(first) if s is not None), torch.device("cpu"))
    with graph.inserting_before(first):
        return _derive(graph, ops.draw_seed.default, (device,), first, kind)


def _specs(node: fx.Node) -> tuple[TensorSpec | None, ...]:
    spec = info(node).spec
    return spec if isinstance(spec, tuple) else (spec,)


def _received(graph: fx.Graph, first: fx.Node, kind: Type | None) -> fx.Node:
    """A block's last argument."""
    entries = placeholders(graph)
    place = graph.inserting_after(entries[-1]) if entries else graph.inserting_before(None)
    with place:
        seed = graph.placeholder("seed")
    set_info(seed, Info(SEED_SPEC, info(first).source, NAME, type=kind))
    return seed


def _seed(graph: fx.Graph, node: fx.Node, target: Any, seed: fx.Node, number: int) -> None:
    given = x = node.all_input_nodes[0]
    if x.target is aten.contiguous.default and info(x).origin == "localize":
        x = x.all_input_nodes[0]  # the order of the memory no longer matters
    kind = info(x).type
    args: tuple[Any, ...] = (x, seed, node.args[1], number)
    if isinstance(kind, Shard):
        args = (*args, *layout_arguments(kind, MESH_DIM))
    node.target, node.args, node.kwargs = target, args, {}
    annotate(node, origin=NAME, axes=None, operands=None)
    if given is not x and not given.users:
        graph.erase_node(given)
