"""How many calls of each block take which plan, under one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from graphpar.passes.choose_recompute.blocks import BlockPlan, Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A distinct graph: its curve, how many plans it takes, and the bytes that are kept under each.

    A plan is for ``repeats`` calls: a module that is called more than once has one plan.
    """

    curve: Curve
    calls: int
    plan_bytes: tuple[int, ...]
    repeats: int = 1


Counts = tuple[tuple[int, ...], ...]
"""For each group, how many calls take each plan."""


def choose_counts(groups: Sequence[Group], budget_bytes: int) -> Counts | None:
    """The counts of least replay time with kept bytes and the largest transient in the budget.

    ``None`` if there are none. An integer program with a count for each plan, and a switch that
    makes the plan's transient count; without the integers it bounds the time from below.
    """
    plans = [(g, p) for g, group in enumerate(groups) for p in range(len(group.plan_bytes))]
    n = len(plans)
    calls = np.array([groups[g].calls for g, _ in plans], dtype=float)
    kept = np.array([groups[g].plan_bytes[p] for g, p in plans], dtype=float)
    transient = np.array([groups[g].curve.plans[p].transient_bytes for g, p in plans], dtype=float)
    time = np.array([groups[g].curve.plans[p].replay_us * groups[g].repeats for g, p in plans])
    unit = max(budget_bytes / 1e9, 1.0)
    # Variables: counts, switches, the largest transient. Bytes in units that HiGHS resolves.
    rows: list[list[float]] = []
    low: list[float] = []
    high: list[float] = []
    for g, group in enumerate(groups):
        rows.append([float(h == g) for h, _ in plans] + [0.0] * (n + 1))
        low.append(group.calls)
        high.append(group.calls)
    for i in range(n):
        used = [0.0] * (2 * n + 1)
        used[i], used[n + i] = 1.0, -calls[i]
        largest = [0.0] * (2 * n + 1)
        largest[n + i], largest[2 * n] = transient[i] / unit, -1.0
        rows += [used, largest]
        low += [-np.inf, -np.inf]
        high += [0.0, 0.0]
    rows.append([*(kept / unit), *([0.0] * n), 1.0])
    low.append(-np.inf)
    high.append(budget_bytes / unit)
    found = milp(
        np.array([*time, *([0.0] * (n + 1))]),
        constraints=LinearConstraint(np.array(rows), lb=np.array(low), ub=np.array(high)),
        bounds=Bounds(0, np.array([*calls, *([1.0] * n), np.inf])),
        integrality=np.array([*([1] * (2 * n)), 0]),
        options={"mip_rel_gap": 0.0, "presolve": False},  # HiGHS prints where it undoes presolve
    )
    if found.x is None:
        return None
    counts: list[list[int]] = [[0] * len(group.plan_bytes) for group in groups]
    for i, (g, p) in enumerate(plans):
        counts[g][p] = round(float(found.x[i]))
    return tuple(map(tuple, counts))


def least_bytes(groups: Sequence[Group]) -> tuple[int, Counts]:
    """The least bytes, kept and transient, that any counts need, and such counts."""
    limits = {plan.transient_bytes for group in groups for plan in group.curve.plans}
    best: tuple[int, Counts] | None = None
    for limit in sorted(limits):
        total, largest, counts = 0, 0, []
        for group in groups:
            legal = [p for p, plan in enumerate(group.curve.plans) if plan.transient_bytes <= limit]
            if not legal:
                break
            p = min(legal, key=lambda p: group.plan_bytes[p])
            total += group.plan_bytes[p] * group.calls
            largest = max(largest, group.curve.plans[p].transient_bytes)
            counts.append(tuple(group.calls * (q == p) for q in range(len(group.plan_bytes))))
        else:
            if best is None or total + largest < best[0]:
                best = total + largest, tuple(counts)
    assert best is not None
    return best


def time_bound(groups: Sequence[Group], fixed: Mapping[int, int], budget_bytes: int) -> float:
    """The least replay time of any plans at all that keep ``budget_bytes``, transients left out.

    The linear program over the vertices of all hulls: fractions of calls are allowed. ``fixed``
    bytes of a group are kept beside its problem's.
    """
    points = [
        (g, nbytes * group.repeats + fixed.get(g, 0), us * group.repeats)
        for g, group in enumerate(groups)
        for nbytes, us in group.curve.bound
    ]
    rows = [[float(h == g) for h, _, _ in points] for g in range(len(groups))]
    unit = max(float(budget_bytes), 1.0)
    found = milp(
        np.array([us for _, _, us in points]),
        constraints=[
            LinearConstraint(np.array(rows), *[[group.calls for group in groups]] * 2),
            LinearConstraint(
                np.array([[nbytes / unit for _, nbytes, _ in points]]), -np.inf, budget_bytes / unit
            ),
        ],
        bounds=Bounds(0, np.inf),
    )
    return float(found.fun) if found.x is not None else float("inf")


def plans_of(group: Group, counts: Sequence[int]) -> list[BlockPlan]:
    """A plan for each call, in order: what makes most at once first, since the later a call is in
    forward, the more is still kept when backward reaches it."""
    plans = [plan for plan, n in zip(group.curve.plans, counts, strict=True) for _ in range(n)]
    return sorted(plans, key=lambda plan: -plan.transient_bytes)
