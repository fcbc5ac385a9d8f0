"""Choosing what to keep: equal to brute force on random graphs of up to 18 ops."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphpar.passes.choose_recompute.problem import Op, Problem, cheapest, hull, within


@st.composite
def problems(draw: st.DrawFn, most: int = 18) -> Problem:
    """Ops that read earlier storages or an input's, and save what they read or make."""
    count = draw(st.integers(1, most))
    nbytes = [draw(st.integers(1, 40))]  # the input
    ops = []
    for _ in range(count):
        known = st.integers(max(0, len(nbytes) - 5), len(nbytes) - 1)
        reads = tuple(sorted(draw(st.sets(known, max_size=3))))
        makes = tuple(range(len(nbytes), len(nbytes) + draw(st.integers(1, 2))))
        nbytes += [draw(st.integers(0, 40)) for _ in makes]
        saves = tuple(sorted(draw(st.sets(st.sampled_from((*reads, *makes)), max_size=2))))
        cost = draw(st.one_of(st.none(), *[st.integers(0, 30)] * 5))
        ops.append(Op(cost_ps=cost, reads=reads, makes=makes, saves=saves))
    return Problem(ops=tuple(ops), nbytes=tuple(nbytes))


def brute_force(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, time) of every set of ops that can run again, by bits of its index."""
    sets = np.arange(2 ** len(problem.ops))
    again = [(sets >> i & 1).astype(bool) for i in range(len(problem.ops))]
    time = np.zeros(len(sets), dtype=np.int64)
    legal = np.ones(len(sets), dtype=bool)
    for i, op in enumerate(problem.ops):
        if op.cost_ps is None:
            legal &= ~again[i]
        time += again[i] * (op.cost_ps or 0)
    nbytes = np.zeros(len(sets), dtype=np.int64)
    for s, size in enumerate(problem.nbytes):
        needed = np.full(len(sets), any(s in op.saves for op in problem.ops))
        for i, op in enumerate(problem.ops):
            if s in op.reads:
                needed = needed | again[i]
        made = [again[i] for i, op in enumerate(problem.ops) if s in op.makes]
        nbytes += size * (needed & ~made[0] if made else needed)
    return nbytes[legal], time[legal]


CHAIN = Problem(
    ops=tuple(Op(cost_ps=c, reads=(i,), makes=(i + 1,), saves=(i,)) for i, c in enumerate([1, 9])),
    nbytes=(4, 8, 2),
)


@given(problems(), st.integers(1, 50), st.integers(1, 50))
@example(CHAIN, 1, 1)
def test_the_cut_is_the_cheapest_plan(problem: Problem, ps: int, byte: int) -> None:
    nbytes, time = brute_force(problem)
    found = problem.cost(cheapest(problem, ps, byte))
    assert byte * found[0] + ps * found[1] == (byte * nbytes + ps * time).min()


@given(problems(12))
@example(CHAIN)
def test_the_hull_is_that_of_all_plans(problem: Problem) -> None:
    nbytes, time = brute_force(problem)
    points = [problem.cost(plan) for plan in hull(problem)]
    assert points[0] == problem.cost(())
    assert points[-1][0] == nbytes.min()
    assert points[-1][1] == time[nbytes == nbytes.min()].min() or len(points) == 1
    assert points == sorted(points, reverse=True)
    for (b0, t0), (b1, t1) in pairwise(points):
        price = Fraction(t1 - t0, b0 - b1)
        assert (price.numerator * nbytes + price.denominator * time).min() == (
            price.numerator * b0 + price.denominator * t0
        )


@given(problems(12), st.floats(0, 1))
@example(CHAIN, 0.5)
def test_plans_between_the_vertices_are_the_fastest(problem: Problem, share: float) -> None:
    nbytes, time = brute_force(problem)
    least, most = int(nbytes.min()), problem.cost(())[0]
    budget = least + round(share * (most - least))
    plan = within(problem, budget)
    assert plan is not None
    found = problem.cost(plan)
    assert found[0] <= budget
    assert found[1] == time[nbytes <= budget].min()
    if least:
        assert within(problem, least - 1) is None


@pytest.mark.parametrize("size", [18])
def test_eighteen_ops_are_brute_forced_in_time(size: int) -> None:
    """The strategy reaches the size; this fixes one of it."""
    ops = tuple(
        Op(cost_ps=(7 * i) % 11, reads=(i,), makes=(i + 1,), saves=(i, i + 1)) for i in range(size)
    )
    problem = Problem(ops=ops, nbytes=tuple((5 * i) % 13 + 1 for i in range(size + 1)))
    nbytes, time = brute_force(problem)
    for budget in range(int(nbytes.min()), int(nbytes.max()), 9):
        plan = within(problem, budget)
        assert plan is not None
        assert problem.cost(plan)[1] == time[nbytes <= budget].min()
