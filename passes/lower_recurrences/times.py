"""Values of all steps that are one value along time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from graphpar.passes.lower_recurrences.pieces import aten, shape_of, whole
from graphpar.program import is_getitem


def stacks_of(states: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """Where all states are stacked in order, or unsqueezed and concatenated; and the dimension."""
    for user in states[0].users:
        args: Any = user.args
        if user.target is aten.stack.default and list(args[0]) == list(states):
            yield user, _dim(user)
        if user.target is aten.unsqueeze.default:
            views = [(aten.unsqueeze.default, (h, args[1])) for h in states]
            for cat in user.users:
                parts: Any = cat.args[0] if cat.target is aten.cat.default else ()
                if [(p.target, p.args) for p in parts] == views and _dim(cat) % 3 == args[1] % 3:
                    yield cat, _dim(cat)


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim)


def run_of(nodes: Sequence[fx.Node]) -> tuple[fx.Node, int, int, int] | None:
    """What the nodes are consecutive places of: it, the dimension, the first place, 1 or -1."""
    found = [_place_of(whole(node)) for node in nodes]
    if None in found or len({each[:2] for each in found if each is not None}) != 1:
        return None
    places = [each[2] for each in found if each is not None]
    steps = {b - a for a, b in pairwise(places)}
    if steps not in ({1}, {-1}):
        return None
    assert found[0] is not None
    return *found[0], steps.pop()


def _place_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    args: Any = node.args
    if node.target is aten.select.int:
        value, dim, place = args
    elif is_getitem(node) and args[0].target is aten.unbind.int:
        (value, *dims), place = args[0].args, args[1]
        dim = dims[0] if dims else 0
    else:
        return None
    shape = shape_of(value)
    return value, dim % len(shape), place % shape[dim]
