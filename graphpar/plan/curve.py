"""Memory of a stage over time, by kind."""

from __future__ import annotations

from dataclasses import dataclass

from graphpar.plan.chunk import Unit
from graphpar.plan.step import StepPlan

KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "transients")


@dataclass(frozen=True, slots=True)
class Sample:
    """From ``start_us`` on, the bytes of activations and transients."""

    start_us: float
    activation_bytes: int
    transient_bytes: int


def memory_curve(step: StepPlan, device: int) -> list[Sample]:
    """What a stage holds beside its state, unit by unit of each task; its highest sum is the peak.

    In forward a unit adds what it keeps, in backward it gives it back; while it runs it needs its
    working bytes.
    """
    usage = step.usages[device]
    found = []
    for event, held in zip(step.events[device], usage.held_bytes, strict=True):
        task = event.task
        whole = (task.chunk, task.microbatch) in usage.whole
        units = (step.whole if whole else step.chunks)[task.chunk].units
        spans = [_us(unit, task.backward) for unit in units]
        scale = (event.end_us - event.start_us) / (sum(spans) or 1.0)
        order = list(zip(units, spans, strict=True))
        now, start_us = held, event.start_us
        for unit, span in reversed(order) if task.backward else order:
            if not task.backward:
                now += unit.kept_bytes
            found.append(Sample(start_us, now, unit.working_bytes))
            if task.backward:
                now -= unit.kept_bytes
            start_us += span * scale
        found.append(Sample(event.end_us, now, 0))
    return found


def _us(unit: Unit, backward: bool) -> float:
    work = unit.work
    return work.backward_us + work.replay_us if backward else work.forward_us


def by_kind(step: StepPlan, device: int) -> list[tuple[str, list[int]]]:
    """The bytes of each of :data:`KINDS` at each sample of :func:`memory_curve`."""
    stage, samples = step.stages[device], memory_curve(step, device)
    constant = (
        stage.parameter_bytes,
        stage.gradient_bytes,
        stage.optimizer_bytes,
        stage.buffer_bytes,
    )
    rows = [[nbytes] * len(samples) for nbytes in constant]
    rows.append([sample.activation_bytes for sample in samples])
    rows.append([sample.transient_bytes for sample in samples])
    return list(zip(KINDS, rows, strict=True))
