"""Recomputation for every stage of a pipeline, each under the budget of its device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from graphpar.cost import GraphRun
from graphpar.errors import InputError
from graphpar.passes.choose_recompute import ChooseRecompute, mark_plans, report_plans
from graphpar.passes.choose_recompute.blocks import BlockPlan, Curve
from graphpar.passes.choose_recompute.calls import Calls
from graphpar.passes.choose_recompute.fit import Plans, fit_plans, least_plans, too_small
from graphpar.plan.chunk import state_bytes
from graphpar.plan.part import state_read
from graphpar.plan.schedule import Pipeline
from graphpar.plan.step import Setup, StepPlan
from graphpar.plan.usage import Need, usage_of
from graphpar.program import Program

ROUNDS = 8


def choose_stages(
    program: Program,
    parts: Sequence[GraphRun],
    setup: Setup,
    planned: Callable[[Program], StepPlan],
) -> tuple[StepPlan, str]:
    """The step in which each stage's peak is in the budget, with the least replay, and a report.

    ``parts`` are the chunks of the root's run, ``planned`` gives the step of a program whose nodes
    are marked. A choice counts what is kept and the largest replay; what a step needs beside is
    measured of it, and the next choice leaves room for that.

    Raises:
        InputError: nothing fits; the message gives the least bytes that would.
    """
    budget, pipeline = setup.budget_bytes, setup.pipeline
    assert budget is not None
    curves: dict[Hashable, Curve] = {}
    stages = []
    for device in range(pipeline.pp):
        steps = tuple(step for part in parts[device :: pipeline.pp] for step in part.steps)
        names = state_read(program, [step.node for step in steps])
        state = setup.state_bytes(*state_bytes(program, frozenset(names)))
        stages.append(
            Calls(
                program,
                replace(parts[0], steps=steps),
                setup.cost,
                state_bytes=state,
                in_flight=chunks_in_flight(pipeline, device) / pipeline.interleave,
                curves=curves,
            )
        )
    least = [least_plans(calls) for calls in stages]
    reserves = [0] * pipeline.pp
    for round in itertools.count(1):
        rows, reports = [], []
        for number, calls in enumerate(stages):
            plans, bound_us = _fitted(calls, budget, reserves[number], setup) or (least[number], 0)
            rows.append(plans)
            options = ChooseRecompute(mode="auto", budget_bytes=budget)
            told = str(report_plans(calls, plans, options, bound_us))
            reports.append(f"stage {number}: {told}" if pipeline.pp > 1 else told)
        step = planned(mark_plans(program, _together(program, rows), program.report))
        excess = [max(0, stage.peak_bytes - budget) for stage in step.stages]
        if not any(excess):
            return step, "\n".join(reports)
        if any(more and rows[n] is least[n] for n, more in enumerate(excess)):
            break
        for number, more in enumerate(excess):
            last = round == ROUNDS and more > 0
            reserves[number] = budget if last else reserves[number] + (more << (round - 1))
    raise _too_small(planned(mark_plans(program, _together(program, least), program.report)))


def _too_small(least: StepPlan) -> InputError:
    """The error for a budget in which the step with the least bytes does not fit."""
    full, setup = least.fullest, least.setup
    assert setup.budget_bytes is not None
    error = InputError(too_small(setup.budget_bytes, full.peak_bytes))
    error.add_note(
        f"parameters, gradients and optimizer states take {full.state_bytes} bytes of it, "
        f"activations {full.activation_bytes} with all recomputation"
    )
    if setup.pipeline.pp > 1:
        error.add_note(f"on stage {least.stages.index(full)} of {setup.pipeline.pp}")
    return error


def chunks_in_flight(pipeline: Pipeline, device: int) -> int:
    """The most forwards of chunks that a device keeps at once."""
    nothing = [Need(kept=0, working=0)] * pipeline.chunks
    return usage_of(pipeline.tasks(device), nothing).in_flight


def _fitted(calls: Calls, budget: int, reserve: int, setup: Setup) -> tuple[Plans, float] | None:
    try:
        alone = setup.pipeline.pp == 1  # else each stage would have blocks of its own
        return fit_plans(calls, budget, must=True, reserve_bytes=reserve, refine=alone)
    except InputError:
        return None


def _together(program: Program, rows: Sequence[Plans]) -> Plans:
    """One plan for each path, equal ones shared; the root runs again what any stage does."""
    shared: dict[Hashable, BlockPlan] = {}
    merged: Plans = {}
    for plans in rows:
        for path, plan in plans.items():
            if not path and path in merged:
                plan = replace(plan, replay=merged[path].replay | plan.replay)
            block = program.calls.get(path, "")
            merged[path] = shared.setdefault((block, plan.replay), plan)
    for path, block in program.calls.items():
        if path not in merged:  # nothing calls it
            merged[path] = next(p for q, p in merged.items() if program.calls.get(q) == block)
    return merged
