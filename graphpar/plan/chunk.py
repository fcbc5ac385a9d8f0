"""What one chunk of a model costs in one microbatch: time, FLOPs and bytes, unit by unit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields, replace

from torch import fx

from graphpar.cost import GraphRun, Step, Times, elapsed_us, is_trained, local_nbytes, total_us
from graphpar.memory import working_bytes
from graphpar.plan.part import part_of, state_read
from graphpar.program import Program, info, is_getitem


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Microseconds and FLOPs on one rank. ``communication_us`` is the time of the collectives that
    are in forward, backward and replay, hidden behind products or not."""

    forward_us: float = 0.0
    backward_us: float = 0.0
    replay_us: float = 0.0
    communication_us: float = 0.0
    model_flops: int = 0
    replay_flops: int = 0

    def __add__(self, other: Work) -> Work:
        names = [f.name for f in fields(self)]
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A call of a block, or what stands between calls. ``kept_bytes`` autograd keeps for it beside
    what earlier units of the chunk keep, ``working_bytes`` it needs at most beside what is kept."""

    name: str
    work: Work
    kept_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """``state`` are the names of the parameters and buffers that it reads."""

    units: tuple[Unit, ...]
    state: frozenset[str]

    @property
    def work(self) -> Work:
        return sum((unit.work for unit in self.units), Work())

    @property
    def kept_bytes(self) -> int:
        return sum(unit.kept_bytes for unit in self.units)

    @property
    def working_bytes(self) -> int:
        """What it needs at most beyond ``kept_bytes``: forward has not yet kept what units behind
        keep, and backward keeps it no more."""
        most = behind = 0
        for unit in reversed(self.units):
            most = max(most, unit.working_bytes - behind)
            behind += unit.kept_bytes
        return most


class Coster:
    """Costs the chunks of one program. Equal units are costed once."""

    def __init__(self, program: Program, times: Times) -> None:
        self.program, self.times = program, times
        self._work: dict[int, tuple[GraphRun, Work]] = {}
        self._working: dict[Hashable, int] = {}

    def chunk(self, part: GraphRun) -> Chunk:
        units, kept = [], set[int]()
        for steps in _units(part):
            run = replace(part, steps=steps)
            fresh = run.saved - kept
            kept |= fresh
            own = sum(part.storages[n].nbytes for n in fresh)
            path = str(steps[0].node.target) if steps[0].block is not None else ""
            units.append(
                Unit(
                    name=path or steps[0].node.name,
                    work=self._work_of(run),
                    kept_bytes=own + sum(step.inner_bytes for step in steps),
                    working_bytes=self._working_of(steps),
                )
            )
        nodes = [step.node for step in part.steps]
        return Chunk(units=tuple(units), state=frozenset(state_read(self.program, nodes)))

    def _work_of(self, run: GraphRun) -> Work:
        total = Work()
        for step in run.steps:
            if step.block is not None:
                key = id(step.block)
                if key not in self._work:  # the run is held, so that no other gets its id
                    self._work[key] = step.block, self._measured(step.block)
                total += self._work[key][1]
        own = [step for step in run.steps if step.block is None]
        return total + self._measured(replace(run, steps=tuple(own)))

    def _measured(self, run: GraphRun) -> Work:
        forward, backward, replay = list(run.kernels), list(run.backward), list(run.replayed)
        collectives = [k for k in (*forward, *backward, *replay) if k.collective]
        return Work(
            forward_us=elapsed_us(self.times, forward),
            backward_us=elapsed_us(self.times, backward),
            replay_us=elapsed_us(self.times, replay),
            communication_us=total_us(self.times, collectives),
            model_flops=sum(k.flops for k in (*forward, *backward)),
            replay_flops=sum(k.flops for k in replay),
        )

    def _working_of(self, steps: tuple[Step, ...]) -> int:
        nodes = [step.node for step in steps if not is_getitem(step.node)]
        key = tuple(self._form(node) for node in nodes)
        if key not in self._working:
            part = part_of(self.program, [step.node for step in steps])
            self._working[key] = working_bytes(part)
        return self._working[key]

    def _form(self, node: fx.Node) -> Hashable:
        """All that the bytes of a node's run depend on."""
        target = node.target
        if node.op == "call_module":
            target = self.program.calls[str(target)]
        touched = (*node.all_input_nodes, node)
        values = [(repr(info(n).spec), repr(info(n).type)) for n in touched]
        return target, tuple(values), info(node).region


def _units(part: GraphRun) -> Iterator[tuple[Step, ...]]:
    """Calls with what takes their results apart, and the steps between."""
    unit: list[Step] = []
    called = False
    for step in part.steps:
        joins = is_getitem(step.node) if called else True
        if unit and (step.block is not None or not joins):
            yield tuple(unit)
            unit = []
        called = step.block is not None or (called and joins and bool(unit))
        unit.append(step)
    if unit:
        yield tuple(unit)


def state_bytes(program: Program, names: frozenset[str]) -> tuple[int, int]:
    """Bytes on a rank of trained parameters among ``names``, and of other state."""
    trained = other = 0
    for name in names:
        state = program.state[name]
        nbytes = local_nbytes(state, program.ranks)
        if is_trained(state):
            trained += nbytes
        else:
            other += nbytes
    return trained, other
