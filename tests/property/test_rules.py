"""Every op rule against its meaning: the op on shards, put together, equals the op run whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpar.axes import Freezer
from graphpar.passes.localize import SUMS
from graphpar.passes.rules import RULES, op_axes, rule_for
from graphpar.passes.rules.table import apply_rule, freeze, replicated
from tests.property.pick import Pick, structured
from tests.property.rule_cases import CASES, makers
from tests.property.rule_checks import (
    RANKS,
    Checker,
    Target,
    derived,
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


@pytest.mark.parametrize("target", [t for t, rule in RULES.items() if rule is replicated], ids=str)
@examples(share=40)
@given(data=st.data())
def test_a_creation_allows_nothing(target: Target, data: st.DataObject) -> None:
    node, _ = node_of(makers(target)[0](Pick(data.draw)))
    op = op_axes(node)
    assert not op.partial
    assert not any(list(strategies(op, ranks)) for ranks in RANKS)


@pytest.mark.parametrize("target", CASES, ids=str)
@examples(share=10)
@given(data=st.data())
def test_an_op_on_shards_is_the_op(target: Target, data: st.DataObject) -> None:
    pick = Pick(data.draw)
    case = pick.one(makers(target))(pick)
    node, operands = node_of(case)
    op, alone = freeze(Freezer(), *apply_rule(node, structured(pick))), op_axes(node)
    assert not op.average or case.target in SUMS
    checker = Checker(node, operands, op, case)
    for ranks in RANKS:
        checker.check_all(ranks)
        for _, strategy in strategies(op, ranks):
            assert derived(alone, strategy, ranks) == strategy, show(strategy)
