"""When each task of a pipeline runs: an event simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphpar.errors import InternalError
from graphpar.plan.schedule import Pipeline, Task


@dataclass(frozen=True, slots=True)
class Event:
    """A task on a device, in microseconds from the start of the step."""

    device: int
    task: Task
    start_us: float
    end_us: float


def simulate(
    pipeline: Pipeline,
    task_us: Callable[[Task], float],
    forward_send_us: Sequence[float] = (),
    backward_send_us: Sequence[float] = (),
) -> list[list[Event]]:
    """The events of each device, in order.

    A device runs its tasks in the pipeline's order, each as soon as what it needs has come: of a
    forward the result of the chunk before, of a backward the gradient of the chunk behind, or the
    forward of the last. ``forward_send_us[c]`` is the time from chunk ``c`` to the next,
    ``backward_send_us[c]`` back from the next; sends run beside the tasks.
    """
    last = pipeline.chunks - 1
    waiting = [pipeline.tasks(device) for device in range(pipeline.pp)]
    events: list[list[Event]] = [[] for _ in waiting]
    done: dict[Task, float] = {}

    def ready_us(task: Task) -> float | None:
        """When all that the task needs is there, if that is known."""
        chunk, microbatch = task.chunk, task.microbatch
        if not task.backward:
            if chunk == 0:
                return 0.0
            before, sends = Task(False, chunk - 1, microbatch), forward_send_us
            send_us = sends[chunk - 1] if sends else 0.0
        elif chunk == last:
            before, send_us = Task(False, chunk, microbatch), 0.0
        else:
            before, sends = Task(True, chunk + 1, microbatch), backward_send_us
            send_us = sends[chunk] if sends else 0.0
        return done[before] + send_us if before in done else None

    places = [0] * pipeline.pp
    moved = True
    while moved:
        moved = False
        for device, tasks in enumerate(waiting):
            while places[device] < len(tasks):
                task = tasks[places[device]]
                ready = ready_us(task)
                if ready is None:
                    break
                free = events[device][-1].end_us if events[device] else 0.0
                start = max(ready, free)
                done[task] = start + task_us(task)
                events[device].append(Event(device, task, start, done[task]))
                places[device] += 1
                moved = True
    if any(place < len(tasks) for place, tasks in zip(places, waiting, strict=True)):
        raise InternalError("the pipeline's order of tasks waits for itself")
    return events
