"""What choose-recompute has to say of its work."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphpar.cost import total_us
from graphpar.passes.choose_recompute.blocks import BlockPlan, Curve
from graphpar.passes.choose_recompute.budget import format_bytes
from graphpar.program import info


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A tensor that is kept or made again: of which node, at what price, from which line."""

    name: str
    op: str
    source: str
    nbytes: int
    us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """One plan of a graph (``""``: the root), for ``calls`` of its calls."""

    block: str
    calls: int
    saved: tuple[Line, ...]
    replayed: tuple[Line, ...]
    replay_us: float
    transient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeReport:
    """Bytes per device and microseconds of one step.

    ``saved_bytes`` autograd keeps, ``transient_bytes`` the largest replay makes at once,
    ``state_bytes`` parameters, gradients and optimizer state take. ``bound_us``: no plans of this
    model keep as little in less replay time. ``forward_us`` is the time of the forward.
    """

    mode: str
    budget_bytes: int | None
    state_bytes: int
    none_bytes: int
    saved_bytes: int
    transient_bytes: int
    forward_us: float
    replay_us: float
    bound_us: float
    plans: tuple[PlanReport, ...]

    @property
    def gap(self) -> float:
        """The distance to the bound, as a part of a step without replay (forward and backward)."""
        return (self.replay_us - self.bound_us) / (3 * self.forward_us or 1.0)

    def __str__(self) -> str:
        budget = "no budget" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        lines = [
            f"recompute {self.mode!r}, {budget}: {format_bytes(self.saved_bytes)} kept of "
            f"{format_bytes(self.none_bytes)}, {format_bytes(self.transient_bytes)} made at once, "
            f"{format_bytes(self.state_bytes)} of state",
            f"replay {self.replay_us:.1f} us beside {self.forward_us:.1f} us of forward; "
            f"gap to the bound {self.gap:.3%} of a step",
        ]
        for plan in self.plans:
            times = f" × {plan.calls}" if plan.calls > 1 else ""
            lines.append(f"{plan.block or 'forward'}{times}: {plan.replay_us:.1f} us each")
            for word, rows in (("keep ", plan.saved), ("again", plan.replayed)):
                for row in rows:
                    us = f", {row.us:.1f} us" if word == "again" else ""
                    lines.append(
                        f"  {word} {format_bytes(row.nbytes)}{us}: {row.name} = {row.op}  "
                        f"{row.source}"
                    )
        return "\n".join(lines)


def plan_report(block: str, calls: int, curve: Curve, plan: BlockPlan) -> PlanReport:
    run = curve.run
    saved = []
    for number in sorted(plan.regions.saved):
        maker = run.storages[number].maker
        saved.append(_line(maker, run.storages[number].nbytes))
    replayed = []
    for step in run.steps:
        if step.node in plan.regions.replayed and step.kernels:
            made = sum(s.nbytes for s in run.storages.values() if s.maker is step.node)
            replayed.append(_line(step.node, made, total_us(curve.times, step.kernels)))
    return PlanReport(
        block=block,
        calls=calls,
        saved=tuple(saved),
        replayed=tuple(replayed),
        replay_us=plan.replay_us,
        transient_bytes=plan.transient_bytes,
    )


def _line(node: fx.Node | None, nbytes: int, us: float = 0.0) -> Line:
    if node is None:
        return Line(name="input", op="input", source="", nbytes=nbytes, us=us)
    source = str(info(node).source)
    return Line(name=node.name, op=str(node.target), source=source, nbytes=nbytes, us=us)
