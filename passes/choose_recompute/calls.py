"""A whole program under a plan for each call: exact bytes, from the runs of its graphs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from graphpar.cost import GraphRun, Step, Times, total_us, training_nbytes
from graphpar.passes.apply_recompute import graph_runs
from graphpar.passes.choose_recompute.blocks import BlockPlan, Curve, curve_of
from graphpar.passes.choose_recompute.mix import Group, time_bound
from graphpar.program import Program


class Calls:
    """The calls of a program's blocks, and its root, with the curve of each distinct graph.

    ``names`` are the graphs in the order of ``groups``; ``paths`` maps each to the called paths
    (of the root: ``""``). ``run`` may be a part of the program's: a pipeline stage, which keeps
    what ``in_flight`` microbatches need; ``state_bytes`` is then that of the stage. ``curves`` are
    those of blocks found before, and gets those found now.
    """

    def __init__(
        self,
        program: Program,
        run: GraphRun,
        times: Times,
        *,
        state_bytes: int | None = None,
        in_flight: float = 1.0,
        curves: dict[Hashable, Curve] | None = None,
    ) -> None:
        self.run, self.in_flight = run, in_flight
        self._curves = {} if curves is None else curves
        if state_bytes is None:
            states = program.state.values()
            state_bytes = sum(training_nbytes(s, program.ranks) for s in states)
        self.state_bytes = state_bytes
        self.forward_us = total_us(times, run.kernels)
        self._block = {"": "", **program.calls}
        self._steps: dict[str, list[Step]] = {}
        for step in run.steps:
            if step.block is not None:
                self._steps.setdefault(str(step.node.target), []).append(step)
        runs = graph_runs(program, run)
        self.names = [name for name in (*program.blocks, "") if name in runs]
        self.paths: dict[str, list[str]] = {name: [] for name in self.names}
        for path, name in self._block.items():
            if not path or path in self._steps:
                self.paths[name].append(path)
        self.groups: list[Group] = []
        self.fixed_bytes: dict[int, int] = {}
        for number, name in enumerate(self.names):
            group, fixed = self._group(name, runs[name], times)
            self.groups.append(group)
            self.fixed_bytes[number] = fixed

    def _group(self, name: str, run: GraphRun, times: Times) -> tuple[Group, int]:
        if not name:
            curve = curve_of(run, times)
            own = [self._bytes(self._root_own(plan)) for plan in curve.plans]
            fixed = own[0] - curve.problem_bytes(curve.plans[0])
            return Group(curve=curve, calls=1, plan_bytes=tuple(map(self._held, own))), fixed
        steps = [step for path in self.paths[name] for step in self._steps[path]]
        share = _shares(run, steps)
        key = name, tuple(share)
        if key not in self._curves:
            self._curves[key] = curve_of(run, times, share)
        curve = self._curves[key]
        parts = dict(zip(run.inputs, share, strict=True))
        repeats = max(len(self._steps[path]) for path in self.paths[name])
        units = len(self.paths[name])
        if repeats > 1:  # one plan for all
            repeats, units = len(steps), 1
        kept = []
        for plan in curve.plans:
            edge = sum(int(run.storages[s].nbytes * parts.get(s, 1)) for s in plan.edge)
            kept.append(self._held(repeats * (plan.inner_bytes + edge)))
        group = Group(curve=curve, calls=units, plan_bytes=tuple(kept), repeats=repeats)
        return group, 0

    def block(self, path: str) -> str:
        return self._block[path]

    def group(self, name: str) -> Group:
        return self.groups[self.names.index(name)]

    # --- plans ---

    def uniform(self, choose: Callable[[str, Curve], BlockPlan]) -> dict[str, BlockPlan]:
        """The same plan for all calls of a graph."""
        chosen = {
            name: choose(name, group.curve)
            for name, group in zip(self.names, self.groups, strict=True)
        }
        return {path: chosen[name] for name in self.names for path in self.paths[name]}

    def none(self) -> dict[str, BlockPlan]:
        return self.uniform(lambda _, curve: curve.none)

    def assigned(self, plans: Sequence[Sequence[BlockPlan]]) -> dict[str, BlockPlan]:
        """For each group a plan for each of its calls, in order."""
        found: dict[str, BlockPlan] = {}
        for name, group, rows in zip(self.names, self.groups, plans, strict=True):
            each = list(rows) * len(self.paths[name]) if group.calls == 1 else list(rows)
            found |= dict(zip(self.paths[name], each, strict=False))
        return found

    def bound_us(self, kept_bytes: int) -> float:
        """No plans at all that keep ``kept_bytes`` have less replay time."""
        return time_bound(self.groups, self.fixed_bytes, int(kept_bytes / self.in_flight))

    # --- bytes ---

    def total_bytes(self, plans: Mapping[str, BlockPlan]) -> int:
        """What is kept, each storage once, and the largest transient."""
        kept = set(self._root_own(plans[""]))
        inner = 0
        for path, plan in plans.items():
            for step in self._steps.get(path, ()):
                inner += plan.inner_bytes
                kept |= self._edges(step, plan)
        return self._held(inner + self._bytes(kept)) + self.transient_bytes(plans)

    def linear_bytes(self, plans: Mapping[str, BlockPlan]) -> int:
        """The same as a sum over groups, for a program without recomputation."""
        return sum(group.plan_bytes[0] * group.calls for group in self.groups)

    @staticmethod
    def transient_bytes(plans: Mapping[str, BlockPlan]) -> int:
        return max(plan.transient_bytes for plan in plans.values())

    def _held(self, nbytes: int) -> int:
        """What all microbatches in flight keep, where one keeps ``nbytes``."""
        return nbytes if self.in_flight == 1 else math.ceil(self.in_flight * nbytes)

    def _bytes(self, numbers: set[int]) -> int:
        return sum(self.run.storages[n].nbytes for n in numbers)

    def _root_own(self, plan: BlockPlan) -> set[int]:
        """What the root keeps for its own ops."""
        members = plan.regions.members
        own = {
            s
            for step in self.run.steps
            if step.block is None and step.node not in members
            for s in step.saves
        }
        own |= plan.regions.kept
        return {s for s in own if not self.run.storages[s].resident}

    def _edges(self, step: Step, plan: BlockPlan) -> set[int]:
        """The root's storages that a call keeps of its arguments and results."""
        assert step.block is not None
        found = set()
        for mine, theirs in (
            (step.block.inputs, step.reads),
            (step.block.outputs, step.results),
        ):
            numbers = [n for n in mine if n is not None]
            found |= {t for n, t in zip(numbers, theirs, strict=True) if n in plan.edge}
        return {s for s in found if not self.run.storages[s].resident}


def _shares(run: GraphRun, steps: Sequence[Step]) -> list[float]:
    """For each input of a block, the part of its bytes that one call answers for."""
    tensors = [i for i, n in enumerate(run.inputs) if n is not None]
    shares = [1.0] * len(run.inputs)
    for place, i in enumerate(tensors):
        shares[i] = len({step.reads[place] for step in steps}) / len(steps)
    return shares
