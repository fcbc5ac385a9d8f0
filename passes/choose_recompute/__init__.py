"""choose_recompute: what to keep for backward, and what to run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from graphpar.cost import Roofline, Times, dry_run, find_hardware
from graphpar.errors import InputError
from graphpar.passes.choose_recompute.blocks import BlockPlan, Curve
from graphpar.passes.choose_recompute.budget import parse_bytes
from graphpar.passes.choose_recompute.calls import Calls
from graphpar.passes.choose_recompute.fit import Plans, fit_plans
from graphpar.passes.choose_recompute.report import RecomputeReport, plan_report
from graphpar.program import Program, annotate, copy_graph
from graphpar.snapshots import take_snapshots

__all__ = [
    "MODES",
    "ChooseRecompute",
    "RecomputeReport",
    "choose_recompute",
    "mark_plans",
    "parse_bytes",
    "report_plans",
]

MODES = ("none", "selective", "full", "auto")
SELECTIVE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseRecompute:
    """``mode``: "none"; "selective", the least kept bytes whose replay takes at most a twentieth of
    forward and backward; "full", the least kept bytes of every block, or of a model without one;
    "auto", the least time in the budget. ``budget_bytes`` per device, for parameters, gradients,
    AdamW's two moments, what autograd keeps and the largest replay; ``must_fit``: where nothing
    fits in it is an error, else a warning, and the least is taken. ``times`` is the cost model
    (default: of an H100).
    """

    mode: Literal["none", "selective", "full", "auto"] = "auto"
    budget_bytes: int | None = None
    must_fit: bool = True
    times: Times | None = None


def choose_recompute(program: Program, options: ChooseRecompute = ChooseRecompute()) -> Program:
    """Mark the nodes that backward runs again; blocks whose calls differ in that are split.

    Each distinct graph is solved once: the hull of kept bytes against replay time by minimum cuts,
    then how many calls take which plan. The plan is a function of the program and the options, so
    it is the same on all ranks. Needs: a program that runs. Ensures: the same ops in the same
    order, in the budget; buffers that the program writes are read through copies made before.
    Numerics: bitwise.

    Raises:
        InputError: nothing fits in the budget; the message gives the least that would.
    """
    if options.mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise InputError(f"recompute must be one of {known}, not {options.mode!r}")
    if options.mode == "none" or (options.mode == "auto" and options.budget_bytes is None):
        return program
    program = take_snapshots(program, every=True)
    times = options.times or Roofline(hardware=find_hardware("h100"))
    calls = Calls(program, dry_run(program), times)
    none = calls.none()
    plans, bound_us = none, 0.0
    if options.mode in ("full", "selective"):
        pick = _full if options.mode == "full" else _selective
        alone = calls.names == [""]  # without a block, the whole is one
        plans = calls.uniform(lambda name, curve: pick(curve) if name or alone else curve.none)
    elif options.budget_bytes is not None:
        plans, bound_us = fit_plans(calls, options.budget_bytes, must=options.must_fit)
    report = report_plans(calls, plans, options, bound_us if options.mode == "auto" else None)
    return mark_plans(program, plans, {**program.report, "recompute": report})


def _full(curve: Curve) -> BlockPlan:
    return curve.plans[-1]


def _selective(curve: Curve) -> BlockPlan:
    limit_us = SELECTIVE_SHARE * 3 * curve.forward_us
    return [p for p in (curve.none, *curve.plans) if p.replay_us <= limit_us][-1]


def mark_plans(program: Program, plans: Plans, report: Mapping[str, Any]) -> Program:
    """The program with a block for each plan, whose nodes are marked."""
    graphs: dict[str, fx.Graph] = {}
    used = {node.name for _, graph in program.graphs() for node in graph.nodes}
    names: dict[tuple[str, BlockPlan], str] = {}
    targets: dict[str, str] = {}
    for path, block in program.calls.items():
        key = block, plans[path]
        if key not in names:
            taken = used | graphs.keys() | program.blocks.keys()
            names[key] = block if block not in graphs else _unique(block, taken)
            graphs[names[key]] = _with_marks(program.blocks[block], plans[path])
        targets[path] = names[key]
    root = _with_marks(program.graph, plans[""])
    return replace(program, graph=root, blocks=graphs, calls=targets, report=report)


def _unique(name: str, taken: Any) -> str:
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _with_marks(graph: fx.Graph, plan: BlockPlan) -> fx.Graph:
    new, nodes = copy_graph(graph)
    for node in plan.replay:
        annotate(nodes[node], replay=True)
    return new


def report_plans(
    calls: Calls, plans: Plans, options: ChooseRecompute, bound_us: float | None
) -> RecomputeReport:
    """``bound_us``: no plans as small take less; ``None`` if none is known."""
    rows: dict[tuple[str, int], list[str]] = {}
    for path, plan in plans.items():
        rows.setdefault((calls.block(path), id(plan)), []).append(path)
    reports = []
    for (block, _), paths in rows.items():
        group = calls.group(block)
        reports.append(plan_report(block, len(paths) * group.repeats, group.curve, plans[paths[0]]))
    replay_us = sum(plans[p].replay_us * calls.group(calls.block(p)).repeats for p in plans)
    transient = calls.transient_bytes(plans)
    return RecomputeReport(
        mode=options.mode,
        budget_bytes=options.budget_bytes,
        state_bytes=calls.state_bytes,
        none_bytes=calls.total_bytes(calls.none()),
        saved_bytes=calls.total_bytes(plans) - transient,
        transient_bytes=transient,
        forward_us=calls.forward_us,
        replay_us=replay_us,
        bound_us=replay_us if bound_us is None else min(bound_us, replay_us),
        plans=tuple(reports),
    )
