"""The predicted timeline as Chrome trace events, which Perfetto opens.

The form: "Trace Event Format", Google, JSON object form; times in microseconds.
"""

from __future__ import annotations

from typing import Any

from graphpar.plan.curve import memory_curve
from graphpar.plan.step import StepPlan

WORK, SENDS = 0, 1


def chrome_trace(step: StepPlan, *, memory: bool = True) -> dict[str, Any]:
    """Stages as processes; on one thread their tasks and what ends the step, on the other what they
    send, as asynchronous events, which may overlap. ``memory`` adds a counter of the bytes of
    activations and transients."""
    events: list[dict[str, Any]] = []
    for device, row in enumerate(step.events):
        events += _names(device)
        for event in row:
            events += _task(step, event)
        stage, now_us = step.stages[device], row[-1].end_us
        for name, us in (
            ("gradient all-reduce", stage.gradient_sync_us),
            ("optimizer", stage.optimizer_us),
        ):
            if us:
                events.append(_span(device, WORK, name, name, now_us, us))
                now_us += us
        if memory:
            for sample in memory_curve(step, device):
                events.append(
                    {
                        "ph": "C",
                        "pid": device,
                        "name": "bytes beside state",
                        "ts": sample.start_us,
                        "args": {
                            "activations": sample.activation_bytes,
                            "transients": sample.transient_bytes,
                        },
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _task(step: StepPlan, event: Any) -> list[dict[str, Any]]:
    task, device = event.task, event.device
    word = "backward" if task.backward else "forward"
    args = {"chunk": task.chunk, "microbatch": task.microbatch}
    if (task.chunk, task.microbatch) in step.usages[device].whole:
        args["keeps all"] = True
    us = event.end_us - event.start_us
    name = f"{word} {task.microbatch}"
    found = [_span(device, WORK, name, word, event.start_us, us, args)]
    to = task.chunk - 1 if task.backward else task.chunk + 1
    if 0 <= to < step.setup.pipeline.chunks:
        send_us = (step.backward_send_us if task.backward else step.forward_send_us)[
            min(task.chunk, to)
        ]
        to_stage = to % step.setup.pipeline.pp
        name = f"{word} {task.microbatch} to stage {to_stage}"
        number = f"{word} {task.chunk} {task.microbatch}"
        found += _message(device, number, name, event.end_us, send_us, {"to chunk": to})
    return found


def _message(
    device: int, number: str, name: str, start_us: float, us: float, args: dict[str, Any]
) -> list[dict[str, Any]]:
    span = _span(device, SENDS, name, "send", start_us, us, args)
    del span["dur"]
    start = {**span, "ph": "b", "id": number}
    return [start, {**start, "ph": "e", "ts": start_us + us}]


def _span(
    device: int,
    thread: int,
    name: str,
    category: str,
    start_us: float,
    us: float,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": device,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start_us,
        "dur": us,
        "args": args or {},
    }


def _names(device: int) -> list[dict[str, Any]]:
    def name(kind: str, text: str, **thread: int) -> dict[str, Any]:
        return {"ph": "M", "pid": device, "name": kind, "args": {"name": text}, **thread}

    return [
        name("process_name", f"stage {device}"),
        {"ph": "M", "pid": device, "name": "process_sort_index", "args": {"sort_index": device}},
        name("thread_name", "work", tid=WORK),
        name("thread_name", "sends", tid=SENDS),
    ]
