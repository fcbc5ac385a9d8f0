"""Copies of buffers that a forward writes, for those who read the old values after it.

A program's writes happen at its end. Backward of an op that reads such a buffer, a second run of
the op and the caller, if the old values are returned, come later: autograd refuses what was written
since, and the others would read the new values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphpar.program import Program, copy_graph, derive, info

NAME = "snapshot"
_library = torch.library.Library("graphpar_state", "DEF")
_library.define("snapshot(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
_library.impl("snapshot", torch.clone, "CompositeExplicitAutograd")
_library.impl("snapshot", torch.library.fallthrough_kernel, "Autograd")  # buffers have no gradient
torch.library.register_fake("graphpar_state::snapshot", torch.clone, lib=_library)

SNAPSHOT: torch._ops.OpOverload = torch.ops.graphpar_state.snapshot.default
"""The copy. Compilers take a ``clone`` of an input for the input, which is then written to."""

_COPY_BY_THEMSELVES = frozenset({torch.ops.aten._native_batch_norm_legit_functional.default})


def take_snapshots(program: Program, *, every: bool) -> Program:
    """Read a copy of each buffer of ``program.mutations`` that autograd may keep, or that is
    returned as it was; with ``every``, of all of them."""
    written = set(program.mutations)
    if not written:
        return program
    graphs: dict[str, fx.Graph] = {}
    for name, graph in program.graphs():
        graphs[name], nodes = copy_graph(graph)
        for node in graph.nodes:
            if node.op != "get_attr" or written.isdisjoint(program.state_names(name, node)):
                continue
            if every or any(map(_comes_later, _readers(node))):
                _copy(graphs[name], nodes[node])
    return program.with_graphs(graphs)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the node's memory, through views too."""
    for user in node.users:
        if user.target in _COPY_BY_THEMSELVES:
            continue
        yield user
        if isinstance(user.target, torch._ops.OpOverload) and _may_be_view(user.target):
            yield from _readers(user)


def _may_be_view(op: torch._ops.OpOverload) -> bool:
    return op.is_view or torch.Tag.maybe_aliasing_or_mutating in op.tags


def _comes_later(reader: fx.Node) -> bool:
    spec = info(reader).spec
    specs = spec if isinstance(spec, tuple) else (spec,)
    return reader.op == "output" or any(s is not None and s.differentiable for s in specs)


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    copies = [user for user in node.users if user.target is SNAPSHOT]
    if not copies:
        kind = info(node).type
        with graph.inserting_after(node):
            copies = [
                derive(
                    graph,
                    SNAPSHOT,
                    (node,),
                    like=node,
                    origin=NAME,
                    operands=None if kind is None else (kind,),
                )
            ]
    node.replace_all_uses_with(copies[0], lambda user: user not in copies)
