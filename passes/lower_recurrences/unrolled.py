"""Recurrences that are unrolled in a trace and are no loop that can be rolled up: which, and why.

A recurrence is products with one matrix, each of what elementwise ops and views make of the result
of another one. Through another product it would be layers that share weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.codegen.sparse_rnn.decide import Decision
from graphpar.passes.lower_recurrences.loops import Loop, Values, inner_nodes
from graphpar.passes.lower_recurrences.pieces import CASTS, SAME, SPLITS, aten, shape_of
from graphpar.program import Program, info, is_getitem, tensor_spec

_PRODUCTS: Mapping[Any, int] = {
    aten.linear.default: 0,
    aten.addmm.default: 1,
    aten.mm.default: 0,
    aten.matmul.default: 0,
}
"""Products, and which argument is the first factor."""
_VIEWS = {
    *CASTS,
    *SAME,
    *SPLITS,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.unbind.int,
    aten.cat.default,
    aten.stack.default,
}


@dataclass(frozen=True, slots=True)
class _Use:
    """A product: ``x`` what meets the matrix, ``left`` whether the matrix stands first."""

    node: fx.Node
    x: fx.Node
    left: bool


def unrolled(program: Program, graph: fx.Graph, loops: Sequence[Loop]) -> dict[str, Decision]:
    """The recurrences of a flat graph that are none of ``loops``, by name, with the reason."""
    products = [n for n in graph.nodes if n.target in _PRODUCTS]
    roots = [_root(factor) for n in products for factor in _factors(n)]
    if len({r for r in roots if r}) == len([r for r in roots if r]):
        return {}  # no state meets two products
    known = {node for loop in loops for link in loop.links for node in inner_nodes(link)}
    found: dict[str, Decision] = {}
    for uses in _groups(products, Values(program, graph)):
        if known.isdisjoint(use.node for use in uses):
            chain, casts = _chain(uses)
            if chain:
                name = info(chain[0].node).source.module or "loop"
                reason = f"{_reason(chain[0], casts)}: {info(chain[0].node).source}"
                found.setdefault(f"{name} {len(chain)} steps", Decision(False, reason))
    return found


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first = _PRODUCTS[node.target]
    args: Any = node.args
    return args[first], args[first + 1]


def _root(node: fx.Node) -> str:
    """The state that a value is computed from, if it is."""
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return str(node.target) if node.op == "get_attr" else ""


def _groups(products: Sequence[fx.Node], values: Values) -> Iterator[list[_Use]]:
    """Products with one matrix that is computed from state alone."""
    groups: dict[Hashable, list[_Use]] = defaultdict(list)
    for node in products:
        a, b = _factors(node)
        keys = values.of(a), values.of(b)
        fixed = [not isinstance(key, fx.Node) for key in keys]
        if fixed == [False, True]:
            groups[keys[1], False].append(_Use(node, a, False))
        elif fixed == [True, False]:
            groups[keys[0], True].append(_Use(node, b, True))
    return (uses for uses in groups.values() if len(uses) > 1)


def _chain(uses: Sequence[_Use]) -> tuple[list[_Use], bool]:
    """The products that read others of these, with those they read; and whether a cast lies
    between them."""
    nodes = {use.node: use for use in uses}
    chain: dict[fx.Node, _Use] = {}
    casts = False
    for use in uses:
        seen, waiting = set[fx.Node](), [use.x]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in nodes:
                chain |= {node: nodes[node], use.node: use}
                casts |= any(each.target in CASTS for each in seen)
            elif _passes(node):
                waiting += node.all_input_nodes
    return list(chain.values()), casts


def _passes(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.target in _VIEWS or is_getitem(node) or torch.Tag.pointwise in tags


def _reason(use: _Use, casts: bool) -> str:
    if use.left:
        return "its state is a column [units, batch], W h: h W with rows of a batch could be one op"
    shape = shape_of(use.x)
    if len(shape) != 2:
        return f"its state has shape {list(shape)}: one of [batch, units] could be one op"
    if casts:
        return f"its state changes type to {tensor_spec(use.x).dtype} within a step (autocast)"
    return "its steps have the form of no cell of torch.nn"
