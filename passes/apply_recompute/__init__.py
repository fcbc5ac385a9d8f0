"""apply_recompute: nodes that backward runs again, in regions that autograd keeps little of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphpar.cost import GraphRun, dry_run
from graphpar.passes.apply_recompute.regions import Regions, find_regions
from graphpar.program import Program, annotate, copy_graph, info, output_node
from graphpar.unfuse import gathered_bytes, keep_gathered

NAME = "apply-recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRecompute:
    pass


def apply_recompute(program: Program, options: ApplyRecompute = ApplyRecompute()) -> Program:
    """Put the nodes that choose-recompute marked into regions, and each region's nodes together.

    A region becomes a function, and what backward runs of it another one
    (:func:`graphpar.ops.recompute.recompute`); the nodes that autograd would keep a dropped value
    for are in it. Needs: a program that runs. Ensures: regions are
    disjoint and consecutive; random draws and collectives keep an order that is the same on all
    ranks. Numerics: bitwise.
    """
    if not any(info(n).replay for _, graph in program.graphs() for n in graph.nodes):
        return program
    runs = graph_runs(program, dry_run(program))
    graphs = {}
    for name, graph in program.graphs():
        marked = [node for node in graph.nodes if info(node).replay]
        if marked and name in runs:
            graphs[name] = _rewritten(graph, find_regions(runs[name], marked))
        else:
            graphs[name] = copy_graph(graph)[0]
    return program.with_graphs(graphs)


def graph_runs(program: Program, run: GraphRun) -> dict[str, GraphRun]:
    """The runs of the root (``""``) and of each block; of a block called in several forms the
    one with most bytes."""
    runs = {"": run}
    for step in run.steps:
        if step.block is not None:
            block = program.calls[str(step.node.target)]
            known = runs.get(block)
            if known is None or known.inner_bytes < step.block.inner_bytes:
                runs[block] = step.block
    return runs


def _rewritten(graph: fx.Graph, regions: Regions) -> fx.Graph:
    """A copy in the regions' order, with a region on each of their nodes."""
    new, nodes = copy_graph(graph)
    end = output_node(new)
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        end.prepend(nodes[node])
    for node in regions.order:
        moved = nodes[node]
        end.prepend(moved)
        annotate(
            moved,
            replay=node in regions.replayed,
            region=regions.members.get(node),
            held=node in regions.held,
        )
        if node in regions.replayed and gathered_bytes(node):
            keep_gathered(moved)  # the second run gathers, and backward need not
    return new
