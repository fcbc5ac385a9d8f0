"""The predicted timeline as Chrome trace events, which Perfetto opens.

The form: "Trace Event Format", Google, JSON object form; times in microseconds, of whole
nanoseconds: Perfetto cuts off what is less, of starts and durations apart, and drops events that
overlap then.
"""

from __future__ import annotations

from typing import Any

from graphpar.plan.curve import memory_curve
from graphpar.plan.step import StepPlan


def chrome_trace(step: StepPlan, *, memory: bool = True) -> dict[str, Any]:
    """Stages as processes of one thread: their tasks and what ends the step; beside it what they
    send, as asynchronous events, which may overlap. ``memory`` adds a counter of the bytes of
    activations and transients.

    Stage 0 is process 1, and its thread too: zero is an idle one to Perfetto, which also wants the
    numbers of threads to differ between processes.
    """
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
                events.append(_span(device, name, name, now_us, us))
                now_us += us
        if memory:
            for sample in memory_curve(step, device):
                events.append(
                    {
                        "ph": "C",
                        "pid": device + 1,
                        "name": "bytes beside state",
                        "ts": _whole(sample.start_us),
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
    found = [_span(device, name, word, event.start_us, us, args)]
    to = task.chunk - 1 if task.backward else task.chunk + 1
    if 0 <= to < step.setup.pipeline.chunks:
        send_us = (step.backward_send_us if task.backward else step.forward_send_us)[
            min(task.chunk, to)
        ]
        to_stage = to % step.setup.pipeline.pp
        name = f"{word} to stage {to_stage}"
        number = f"{word} {task.chunk} {task.microbatch}"
        args = {"to chunk": to, "microbatch": task.microbatch}
        found += _message(device, number, name, event.end_us, send_us, args)
    return found


def _message(
    device: int, number: str, name: str, start_us: float, us: float, args: dict[str, Any]
) -> list[dict[str, Any]]:
    span = _span(device, name, "send", start_us, us, args)
    del span["dur"]
    start = {**span, "ph": "b", "id2": {"local": number}}
    return [start, {**start, "ph": "e", "ts": _whole(start_us + us)}]


def _whole(us: float) -> float:
    return round(us, 3)


def _span(
    device: int,
    name: str,
    category: str,
    start_us: float,
    us: float,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": device + 1,
        "tid": device + 1,
        "name": name,
        "cat": category,
        "ts": _whole(start_us),
        "dur": _whole(_whole(start_us + us) - _whole(start_us)),
        "args": args or {},
    }


def _names(device: int) -> list[dict[str, Any]]:
    def meta(kind: str, **args: str | int) -> dict[str, Any]:
        return {"ph": "M", "pid": device + 1, "tid": device + 1, "name": kind, "args": args}

    return [
        meta("process_name", name=f"stage {device}"),
        meta("process_sort_index", sort_index=device),
        meta("thread_name", name="work"),
    ]
