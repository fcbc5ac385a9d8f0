"""Plans for all calls of a program under one budget."""

from __future__ import annotations

import warnings

from graphpar.errors import GraphparWarning, InputError
from graphpar.passes.choose_recompute.blocks import BlockPlan
from graphpar.passes.choose_recompute.budget import format_bytes
from graphpar.passes.choose_recompute.calls import Calls
from graphpar.passes.choose_recompute.mix import choose_counts, least_bytes, plans_of

Plans = dict[str, BlockPlan]
"""The plan of each called path; ``""`` is the root."""


def fit_plans(
    calls: Calls, budget_bytes: int, *, must: bool, reserve_bytes: int = 0, refine: bool = True
) -> tuple[Plans, float]:
    """The fastest plans in the budget less ``reserve_bytes``, and a bound on the time of any.

    ``refine``: what bytes are left go to one call of each block, as a plan of its own.

    Raises:
        InputError: there are none and there ``must`` be; the message gives the least that would do.
    """
    none = calls.none()
    available = budget_bytes - reserve_bytes - calls.state_bytes
    if calls.total_bytes(none) <= available:
        return none, 0.0
    offset = calls.total_bytes(none) - calls.linear_bytes(none)
    limit = available - offset
    for _ in range(20):
        counts = choose_counts(calls.groups, limit) if limit > 0 else None
        if counts is None:
            break
        plans = calls.assigned([plans_of(g, c) for g, c in zip(calls.groups, counts, strict=True)])
        excess = calls.total_bytes(plans) - available
        if excess <= 0:
            plans = _refined(calls, plans, available) if refine else plans
            return plans, calls.bound_us(available - offset - calls.transient_bytes(plans))
        limit -= excess
    least = least_plans(calls)
    needed = calls.total_bytes(least)
    if needed <= available:
        return least, calls.bound_us(available - offset - calls.transient_bytes(least))
    needed += reserve_bytes
    message = too_small(budget_bytes, needed + calls.state_bytes)
    if not must:
        warnings.warn(f"{message}, which is taken", GraphparWarning, stacklevel=2)
        return least, 0.0
    error = InputError(message)
    error.add_note(
        f"parameters, gradients and AdamW's moments take {calls.state_bytes} bytes of it; "
        f"autograd keeps {needed} with all recomputation, {calls.total_bytes(none)} with none"
    )
    raise error


def too_small(budget_bytes: int, least: int) -> str:
    return (
        f"memory_budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: "
        f"the least that works is {least} bytes ({format_bytes(least)})"
    )


def least_plans(calls: Calls) -> Plans:
    """Those that keep the fewest bytes, the largest replay's included."""
    counts = least_bytes(calls.groups)[1]
    return calls.assigned([plans_of(g, c) for g, c in zip(calls.groups, counts, strict=True)])


def _refined(calls: Calls, plans: Plans, available: int) -> Plans:
    """One call of each block gets a plan between the vertices, for the bytes that are left."""
    for group, name in zip(calls.groups, calls.names, strict=True):
        if group.repeats > 1:
            continue
        path = max(calls.paths[name], key=lambda p: plans[p].replay_us)
        left = int((available - calls.total_bytes(plans)) / calls.in_flight)
        have = group.curve.problem_bytes(plans[path])
        better = group.curve.within(have + left) if plans[path].replay else None
        if better is not None and better.replay_us < plans[path].replay_us:
            changed = {**plans, path: better}
            if calls.total_bytes(changed) <= available:
                plans = changed
    return plans
