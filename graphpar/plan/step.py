"""A training step on a pipeline: its stages' memory, its timeline, its use of the hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from graphpar.cost import Hardware, Kernel, Roofline, Times, is_trained, local_nbytes
from graphpar.errors import InputError
from graphpar.plan.chunk import Chunk, Work
from graphpar.plan.deal import Message, send_us
from graphpar.plan.optimizer import ADAMW, Optimizer
from graphpar.plan.schedule import Pipeline, Task
from graphpar.plan.simulate import Event, simulate
from graphpar.plan.usage import Need, Usage, usage_of
from graphpar.program import Program

ALONE = Pipeline()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a step runs on: ``tp`` ranks a stage, ``pipeline``, ``dp`` replicas. Neighbouring ranks
    are of one tensor-parallel group, then come the replicas, then the stages."""

    hardware: Hardware
    tp: int = 1
    dp: int = 1
    pipeline: Pipeline = ALONE
    budget_bytes: int | None = None
    whole_microbatches: bool = False
    times: Times | None = None
    optimizer: Optimizer = ADAMW

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise InputError(f"dp must be at least 1, not {self.dp}")

    @cached_property
    def cost(self) -> Times:
        return self.times or Roofline(hardware=self.hardware)

    def state_bytes(self, trained: int, other: int) -> int:
        """Those of parameters of ``trained`` bytes, their gradients and the optimizer's states, and
        of what is not trained."""
        held = 1 + self.optimizer.gradients + self.optimizer.states
        return held * trained + other

    def adds(self, microbatches: int) -> int:
        """Of how many microbatches gradients are added to those before."""
        return microbatches if self.optimizer.adds_first else microbatches - 1

    @property
    def devices(self) -> int:
        return self.tp * self.dp * self.pipeline.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Memory of one device of a stage, in bytes, and its time in a step, in microseconds.

    ``activation_bytes`` are what autograd keeps and ``transient_bytes`` what else is made, at the
    peak. ``in_flight`` is the most forwards, one for each microbatch and chunk, that it keeps at
    once; of ``whole_microbatches``, counted alike, nothing is made again.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    transient_bytes: int
    peak_bytes: int
    in_flight: int
    whole_microbatches: int
    forward_us: float
    backward_us: float
    replay_us: float
    communication_us: float
    gradient_sync_us: float
    optimizer_us: float

    @property
    def state_bytes(self) -> int:
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step of ``microbatches`` on each replica.

    ``bubble`` is the share of the pipeline's time in which a stage waits, all stages together.
    ``mfu`` and ``hfu`` count FLOPs of the model, and FLOPs with those of replays, over what all
    devices could do at their peak rate in ``iteration_us`` (Korthikanti et al. 2022, section 6).
    """

    setup: Setup
    stages: tuple[Stage, ...]
    chunks: tuple[Chunk, ...]
    whole: tuple[Chunk, ...]
    usages: tuple[Usage, ...]
    events: tuple[tuple[Event, ...], ...]
    forward_send_us: tuple[float, ...]
    backward_send_us: tuple[float, ...]
    iteration_us: float
    bubble: float
    mfu: float
    hfu: float

    @property
    def fullest(self) -> Stage:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def busiest(self) -> Stage:
        """The stage with most work."""
        return max(self.stages, key=_busy_us)

    @property
    def fits(self) -> bool:
        """Whether every stage's peak is in the budget."""
        budget = self.setup.budget_bytes
        return budget is None or self.fullest.peak_bytes <= budget

    @property
    def overhead(self) -> float:
        """Replay as a part of forward and backward, on the busiest stage."""
        busy = self.busiest
        return busy.replay_us / ((busy.forward_us + busy.backward_us) or 1.0)


def _busy_us(stage: Stage) -> float:
    return stage.forward_us + stage.backward_us + stage.replay_us


def plan_step(
    program: Program,
    chunks: Sequence[Chunk],
    between: Sequence[Message],
    setup: Setup,
    *,
    model_flops: int,
    dtype: torch.dtype,
    whole: Sequence[Chunk] = (),
) -> StepPlan:
    """Lay the chunks out on the pipeline of ``setup``.

    ``whole`` are the same chunks without recomputation, for microbatches that keep all.
    ``model_flops`` are those of one microbatch of the unmodified model, forward and backward, in
    products of ``dtype``.
    """
    pipeline, times = setup.pipeline, setup.cost
    mine = [chunks[device :: pipeline.pp] for device in range(pipeline.pp)]
    shared = Counter(name for row in mine for name in frozenset().union(*(c.state for c in row)))
    states = [_state(program, row) for row in mine]
    usages = []
    for device, (trained, other) in enumerate(states):
        available = 0
        if whole and setup.budget_bytes is not None:
            available = setup.budget_bytes - setup.state_bytes(trained, other)
        usages.append(
            usage_of(
                pipeline.tasks(device),
                _needs(chunks),
                whole=_needs(whole),
                available_bytes=available,
            )
        )
    complete = {key for usage in usages for key in usage.whole}
    add_us = [_add_us(program, chunk, setup) for chunk in chunks]

    works, whole_works = [c.work for c in chunks], [c.work for c in whole]

    def task_us(task: Task) -> float:
        kept = bool(complete) and (task.chunk, task.microbatch) in complete
        work = (whole_works if kept else works)[task.chunk]
        if not task.backward:
            return work.forward_us
        adds = setup.adds(task.microbatch + 1) > 0
        return work.backward_us + work.replay_us + add_us[task.chunk] * adds

    stride = setup.tp * setup.dp
    sends = [
        send_us(times, m.sharded_bytes, m.whole_bytes, tp=setup.tp, stride=stride) for m in between
    ]
    returns = [
        send_us(times, m.sharded_gradient_bytes, m.whole_gradient_bytes, tp=setup.tp, stride=stride)
        for m in between
    ]
    events = simulate(pipeline, task_us, sends, returns)
    stages, ends = [], []
    for device, usage in enumerate(usages):
        numbers = range(device, pipeline.chunks, pipeline.pp)
        stage = _stage(
            program, setup, chunks, whole, usage, numbers, states[device], shared, add_us
        )
        stages.append(stage)
        ends.append(events[device][-1].end_us + stage.gradient_sync_us + stage.optimizer_us)
    span_us = max(events[device][-1].end_us for device in range(pipeline.pp))
    busy_us = sum(event.end_us - event.start_us for row in events for event in row)
    iteration_us = max(ends)
    microbatches = pipeline.microbatches * setup.dp
    again = sum(c.work.replay_flops for c in chunks) * pipeline.microbatches
    again -= sum(chunks[chunk].work.replay_flops for chunk, _ in complete)
    possible = iteration_us * setup.devices * setup.hardware.flops_per_us[dtype]
    done = model_flops * microbatches
    return StepPlan(
        setup=setup,
        stages=tuple(stages),
        chunks=tuple(chunks),
        whole=tuple(whole),
        usages=tuple(usages),
        events=tuple(map(tuple, events)),
        forward_send_us=tuple(sends),
        backward_send_us=tuple(returns),
        iteration_us=iteration_us,
        bubble=1 - busy_us / (span_us * pipeline.pp) if span_us else 0.0,
        mfu=done / possible if possible else 0.0,
        hfu=(done + again * setup.tp * setup.dp) / possible if possible else 0.0,
    )


def _needs(chunks: Sequence[Chunk]) -> list[Need]:
    return [Need(kept=chunk.kept_bytes, working=chunk.working_bytes) for chunk in chunks]


def _state(program: Program, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Bytes on a rank of the trained parameters of a stage, and of its other state."""
    trained = other = 0
    for name in {name for chunk in chunks for name in chunk.state}:
        nbytes = local_nbytes(program.state[name], program.ranks)
        if is_trained(program.state[name]):
            trained += nbytes
        else:
            other += nbytes
    return trained, other


def _add_us(program: Program, chunk: Chunk, setup: Setup) -> float:
    """The time to add a microbatch's gradients to those before."""
    trained = _state(program, [chunk])[0]
    return _memory_us(setup, "aten.add_", setup.optimizer.adding * trained)


def _memory_us(setup: Setup, op: str, bytes_moved: int) -> float:
    return setup.cost.kernel_us(Kernel(op=op, bytes_moved=bytes_moved)) if bytes_moved else 0.0


def _all_reduce_us(setup: Setup, nbytes: int, ranks: int, stride: int) -> float:
    if not nbytes or ranks == 1:
        return 0.0
    kind = "all_reduce"
    return setup.cost.kernel_us(
        Kernel(op=kind, collective=kind, ranks=ranks, stride=stride, whole_bytes=nbytes)
    )


def _stage(
    program: Program,
    setup: Setup,
    chunks: Sequence[Chunk],
    whole: Sequence[Chunk],
    usage: Usage,
    mine: range,
    state: tuple[int, int],
    shared: Counter[str],
    add_us: Sequence[float],
) -> Stage:
    trained, other = state
    count, optimizer = setup.pipeline.microbatches, setup.optimizer
    work = Work()
    for chunk in mine:
        kept = sum(c == chunk for c, _ in usage.whole)
        work = work + _times(chunks[chunk].work, count - kept)
        if kept:
            work = work + _times(whole[chunk].work, kept)
    tied = {name for chunk in mine for name in chunks[chunk].state if shared[name] > 1}
    sync_us = _all_reduce_us(setup, optimizer.gradients * trained, setup.dp, setup.tp)
    if setup.pipeline.pp > 1:  # a parameter of two stages: their gradients are summed
        nbytes = sum(
            local_nbytes(program.state[name], program.ranks)
            for name in tied
            if is_trained(program.state[name])
        )
        nbytes *= optimizer.gradients
        sync_us += _all_reduce_us(setup, nbytes, 2, setup.tp * setup.dp)
    return Stage(
        parameter_bytes=trained,
        gradient_bytes=optimizer.gradients * trained,
        optimizer_bytes=optimizer.states * trained,
        buffer_bytes=other,
        activation_bytes=usage.kept_bytes,
        transient_bytes=usage.working_bytes,
        peak_bytes=setup.state_bytes(trained, other) + usage.peak_bytes,
        in_flight=usage.in_flight,
        whole_microbatches=len(usage.whole),
        forward_us=work.forward_us,
        backward_us=work.backward_us + setup.adds(count) * sum(add_us[chunk] for chunk in mine),
        replay_us=work.replay_us,
        communication_us=work.communication_us,
        gradient_sync_us=sync_us,
        optimizer_us=_memory_us(setup, "aten._fused_adamw_", optimizer.traffic * trained),
    )


def _times(work: Work, count: int) -> Work:
    return Work(**{name: getattr(work, name) * count for name in Work.__slots__})
