"""The op rules against DTensor: what it allows and we do not is listed with a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from graphpar.passes.rules import op_axes, rule_for
from tests.property.dtensor_gaps import GAPS, NOT_TAKEN, OPAQUE, REFUTED, TORCH
from tests.property.dtensor_rules import (
    REFUTED as WRONG,
)
from tests.property.dtensor_rules import alike, compare, functional_ops, takes_whole, two_ranks
from tests.property.pick import Seeded
from tests.property.rule_cases import CASES, makers
from tests.property.rule_checks import RANKS, Checker, Target, node_of

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(TORCH), reason=f"lists the strategies of torch {TORCH}"
)

# Calls of an op at least, and at most: as many as it takes to see all that is listed.
LEAST, MOST = 2, 12


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with two_ranks() as mesh:
        yield mesh


def others() -> list[Target]:
    """The pointwise ops that DTensor has a strategy for and :data:`CASES` do not show."""
    return [op for op in functional_ops() if rule_for(op) and op not in CASES]


def listed(op: str) -> set[str]:
    return {*GAPS.get(op, {}), *([WRONG] if op in REFUTED else [])}


def gaps(target: Target, mesh: DeviceMesh) -> dict[str, set[str]]:
    """By op: a maker may call other overloads than the one it is listed for."""
    calls = makers(target) if target in CASES else (alike(target),)
    found: dict[str, set[str]] = {str(target): set()}
    for seed in range(MOST):
        for gap in compare(calls, seed, mesh).gaps:
            form = WRONG if gap.verdict == WRONG else gap.form
            found.setdefault(gap.op, set()).add(form)
        if seed + 1 >= LEAST and listed(str(target)) <= found[str(target)]:
            break
    return found


@pytest.mark.parametrize("target", CASES, ids=str)
def test_what_dtensor_allows_we_allow_or_list(target: Target, mesh: DeviceMesh) -> None:
    found = gaps(target, mesh)
    assert found[str(target)] == listed(str(target))
    for op, forms in found.items():
        assert forms <= listed(op), op


def test_dtensor_is_asked_what_it_can_answer(mesh: DeviceMesh) -> None:
    """Every op runs on whole operands, but for those that it has no strategy or no kernel for."""
    asked = [make(Seeded(0)) for target in CASES for make in makers(target)]
    asked += [alike(target)(Seeded(0)) for target in others()]
    refused = {str(case.target) for case in asked if not takes_whole(case, mesh)}
    assert refused == NOT_TAKEN


def test_other_pointwise_ops_run_as_dtensor_runs_them(mesh: DeviceMesh) -> None:
    """Brute force first: they have no case of their own in the tests of the rules."""
    for target in others():
        case = alike(target)(Seeded(0))
        node, operands = node_of(case)
        checker = Checker(node, operands, op_axes(node), case)
        assert sum(checker.check_all(ranks) for ranks in RANKS), target
        assert gaps(target, mesh)[str(target)] == listed(str(target)), target


def test_the_lists_name_ops_of_dtensor() -> None:
    known = {*map(str, CASES), *map(str, others())}
    assert {*GAPS, *REFUTED} <= known
    opaque = {str(op) for op in functional_ops() if rule_for(op) is None}
    assert opaque == {op for ops in OPAQUE.values() for op in ops}
