"""Every op rule against its meaning: the op on shards, put together, equals the op run whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphpar.axes import Freezer, Term, TermDim, TermDims, concat
from graphpar.passes.rules import RULES, op_axes, rule_for
from graphpar.passes.rules.table import apply_rule, freeze
from graphpar.program import tensor_spec
from tests.property.rule_cases import CASES, Pick, Target, makers
from tests.property.rule_checks import (
    RANKS,
    Checker,
    derived,
    factorisations,
    node_of,
    show,
    strategies,
)


def examples(share: int) -> settings:
    """The profile's number of examples over ``share``."""
    return settings(max_examples=max(settings().max_examples // share, 2))


def test_every_rule_has_a_case() -> None:
    assert set(RULES) <= set(CASES)
    assert all(rule_for(target) for target in CASES)


# --- dimensions as a program may have made them before the op ----------------------------------


def structure(pick: Pick, size: int, pool: list[TermDim]) -> TermDim:
    """An axis, a product, consecutive parts, or the axes of another dimension."""
    same = [dim for dim in pool if dim and Term_size(dim) == size]
    kind = pick.int(0, 6)
    if size == 1:
        return []
    if kind == 1 and same:
        return pick.one(same)
    if kind in (2, 3):
        return [Term(n) for n in pick.one(factorisations(size))]
    if kind in (4, 5):
        sizes = pick.sizes(size)
        parts = [structure(pick, n, pool) for n in sizes]
        if len(set(sizes)) == 1 and pick.flag():
            parts = [parts[0]] * len(parts)
        return concat(parts) if len(parts) > 1 else parts[0]
    return [Term(size)]


def Term_size(dim: TermDim) -> int:
    n = 1
    for term in dim:
        n *= term.size
    return n


def structured(pick: Pick) -> Callable[[fx.Node], TermDims]:
    memo: dict[fx.Node, TermDims] = {}
    pool: list[TermDim] = []
    plain = pick.flag()

    def dims(node: fx.Node) -> TermDims:
        if node not in memo:
            memo[node] = []
            for size in tensor_spec(node).shape:
                dim = [Term(size)] if plain and size != 1 else structure(pick, size, pool)
                memo[node].append(dim)
                pool.append(dim)
        return memo[node]

    return dims


@pytest.mark.parametrize("target", CASES, ids=str)
@examples(share=10)
@given(data=st.data())
def test_an_op_on_shards_is_the_op(target: Target, data: st.DataObject) -> None:
    pick = Pick(data.draw)
    case = pick.one(makers(target))(pick)
    node, operands = node_of(case)
    op, alone = freeze(Freezer(), *apply_rule(node, structured(pick))), op_axes(node)
    checker = Checker(node, operands, op, case)
    for ranks in RANKS:
        checker.check_all(ranks)
        for _, strategy in strategies(op, ranks):
            assert derived(alone, strategy, ranks) == strategy, show(strategy)
