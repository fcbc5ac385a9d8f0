"""The plans of one graph: points of its curve of bytes against time, as regions execute them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from graphpar.cost import GraphRun, Times, total_us
from graphpar.passes.apply_recompute.regions import Regions, find_regions, replayable
from graphpar.passes.choose_recompute.problem import Op, Problem, hull, pareto, within

PS = 1_000_000  # picoseconds in a microsecond


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPlan:
    """What to run again in one graph, and what that comes to.

    ``inner_bytes`` are kept beside the graph's inputs and outputs, ``edge`` the storages of these
    that are kept. ``replay_us`` is the time of the second runs, ``transient_bytes`` what the
    largest of them makes at once.
    """

    replay: frozenset[fx.Node]
    regions: Regions
    inner_bytes: int
    edge: frozenset[int]
    replay_us: float
    transient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The plans of one graph that no other beats, from most bytes to least, and their problem.

    ``forward_us`` is the time of one forward.
    """

    run: GraphRun
    problem: Problem
    nodes: tuple[fx.Node, ...]
    plans: tuple[BlockPlan, ...]
    bound: tuple[tuple[int, float], ...]
    forward_us: float
    times: Times

    @property
    def none(self) -> BlockPlan:
        return self.plan(())

    def within(self, budget_bytes: int) -> BlockPlan | None:
        """The fastest plan that keeps at most ``budget_bytes``, inputs and outputs counted."""
        found = within(self.problem, budget_bytes)
        return None if found is None else self.plan(found)

    def kept_bytes(self, plan: BlockPlan) -> int:
        """The bytes of a plan, inputs and outputs counted."""
        return _bytes(self.run, plan)

    def problem_bytes(self, plan: BlockPlan) -> int:
        """The bytes of a plan as the problem counts them."""
        place = {node: i for i, node in enumerate(self.nodes)}
        return self.problem.cost([place[node] for node in plan.replay])[0]

    def plan(self, replay: Iterable[int]) -> BlockPlan:
        return _realized(self.run, self.times, frozenset(self.nodes[i] for i in replay))


def curve_of(run: GraphRun, times: Times, share: Sequence[float] = ()) -> Curve:
    """The curve of one graph. ``share``: for each input, the part of its bytes that one call of
    the graph answers for, since calls may have an input in common."""
    problem, nodes = problem_of(run, times, share)
    vertices = hull(problem)
    candidates = [_realized(run, times, frozenset(nodes[i] for i in vertex)) for vertex in vertices]
    plans = pareto(candidates, lambda p: (_bytes(run, p), p.replay_us, p.transient_bytes))
    plans.sort(key=lambda p: (-_bytes(run, p), p.replay_us))
    costs = [problem.cost(vertex) for vertex in vertices]
    return Curve(
        run=run,
        problem=problem,
        nodes=nodes,
        plans=tuple(plans),
        bound=tuple((nbytes, ps / PS) for nbytes, ps in costs),
        forward_us=sum(total_us(times, step.kernels) for step in run.steps),
        times=times,
    )


def _bytes(run: GraphRun, plan: BlockPlan) -> int:
    return plan.inner_bytes + sum(run.storages[s].nbytes for s in plan.edge)


def problem_of(
    run: GraphRun, times: Times, share: Sequence[float] = ()
) -> tuple[Problem, tuple[fx.Node, ...]]:
    """The graph as a :class:`Problem`, and the node of each op.

    State is always there. What a called block reads or keeps is kept for it.
    """
    pinned = {s for step in run.steps if step.block is not None for s in (*step.reads, *step.saves)}
    pinned |= {n for n, storage in run.storages.items() if storage.resident}
    numbers = [n for n in run.storages if n not in pinned]
    place = {number: i for i, number in enumerate(numbers)}
    makes: dict[fx.Node, list[int]] = {}
    for number in numbers:
        maker = run.storages[number].maker
        if maker is not None:
            makes.setdefault(maker, []).append(place[number])
    ops, nodes = [], []
    for step in run.steps:
        made = tuple(makes.get(step.node, ()))
        saves = tuple(dict.fromkeys(place[s] for s in step.saves if s in place))
        if not made and not saves:
            continue
        cost = round(total_us(times, step.again) * PS)
        ops.append(
            Op(
                cost_ps=cost if replayable(step.node) else None,
                reads=tuple(dict.fromkeys(place[s] for s in step.reads if s in place)),
                makes=made,
                saves=saves,
            )
        )
        nodes.append(step.node)
    parts = dict(zip(run.inputs, share, strict=True)) if share else {}
    nbytes = tuple(int(run.storages[n].nbytes * parts.get(n, 1)) for n in numbers)
    return Problem(ops=tuple(ops), nbytes=nbytes), tuple(nodes)


def _realized(run: GraphRun, times: Times, replay: frozenset[fx.Node]) -> BlockPlan:
    regions = find_regions(run, replay)
    edges = {*run.inputs, *run.outputs}
    return BlockPlan(
        replay=replay,
        regions=regions,
        inner_bytes=sum(run.storages[s].nbytes for s in regions.saved - edges),
        edge=frozenset(s for s in regions.saved if s in edges),
        replay_us=total_us(times, regions.kernels),
        transient_bytes=regions.transient_bytes,
    )
