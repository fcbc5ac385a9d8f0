"""Pipeline schedules: bubbles, what is in flight, and that no order breaks what it depends on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpar.errors import InputError
from graphpar.plan import Event, Pipeline, Task, simulate
from graphpar.plan.usage import Need, Usage, usage_of

pipelines = st.builds(
    lambda pp, chunks, laps, more: Pipeline(
        pp=pp,
        interleave=chunks if pp > 1 else 1,
        microbatches=laps * pp if pp > 1 and chunks > 1 else laps + more,
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 5),
)


def span(events: list[list[Event]]) -> float:
    return max(row[-1].end_us for row in events)


def usage(pipeline: Pipeline, device: int, kept: int = 1) -> Usage:
    need = [Need(kept=kept, working=0)] * pipeline.chunks
    return usage_of(pipeline.tasks(device), need)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 64)])
def test_the_bubble_is_that_of_1f1b(pp: int, microbatches: int) -> None:
    """(p - 1) / m of the time of the work: Narayanan et al. 2021, section 2.2.1."""
    pipeline = Pipeline(pp=pp, microbatches=microbatches)
    work_us = microbatches * 3.0
    found = span(simulate(pipeline, lambda task: 2.0 if task.backward else 1.0))
    assert found == pytest.approx(work_us * (1 + (pp - 1) / microbatches))


@pytest.mark.parametrize(("pp", "interleave", "laps"), [(2, 2, 1), (4, 2, 2), (8, 3, 8)])
def test_the_bubble_is_smaller_by_the_chunks(pp: int, interleave: int, laps: int) -> None:
    """(p - 1) / (v m): section 2.2.2."""
    pipeline = Pipeline(pp=pp, interleave=interleave, microbatches=laps * pp)
    work_us = pipeline.microbatches * interleave * 3.0
    found = span(simulate(pipeline, lambda task: 2.0 if task.backward else 1.0))
    bubble = (pp - 1) / (interleave * pipeline.microbatches)
    assert found == pytest.approx(work_us * (1 + bubble))


@pytest.mark.parametrize(("pp", "microbatches"), [(4, 2), (4, 4), (8, 64)])
def test_a_stage_keeps_one_microbatch_less_than_the_one_before(pp: int, microbatches: int) -> None:
    """max(0, p - S) of stage S: Korthikanti et al. 2022, section 4.2.3."""
    pipeline = Pipeline(pp=pp, microbatches=microbatches)
    for device in range(pp):
        assert usage(pipeline, device).in_flight == min(microbatches, pp - device)


@pytest.mark.parametrize(("pp", "interleave", "laps"), [(8, 3, 8), (35, 3, 8), (4, 2, 3)])
def test_the_first_stage_keeps_more_interleaved(pp: int, interleave: int, laps: int) -> None:
    """All layers' activations times 1 + (p - 1) / (p m): section 4.2.3."""
    pipeline = Pipeline(pp=pp, interleave=interleave, microbatches=laps * pp)
    layer_bytes, layers = 100, pipeline.chunks * 2
    peak = usage(pipeline, 0, kept=layer_bytes * 2).peak_bytes
    assert peak == pytest.approx(layer_bytes * layers * (1 + (pp - 1) / (pp * interleave)))


@given(pipelines)
def test_a_device_runs_each_task_once_and_forward_first(pipeline: Pipeline) -> None:
    for device in range(pipeline.pp):
        tasks = pipeline.tasks(device)
        chunks = range(device, pipeline.chunks, pipeline.pp)
        wanted = {
            Task(backward, chunk, m)
            for backward in (False, True)
            for chunk in chunks
            for m in range(pipeline.microbatches)
        }
        assert len(tasks) == len(wanted)
        assert set(tasks) == wanted
        place = {task: i for i, task in enumerate(tasks)}
        for task in tasks:
            if task.backward:
                assert place[Task(False, task.chunk, task.microbatch)] < place[task]


@given(pipelines, st.lists(st.floats(0, 5), min_size=8, max_size=8), st.data())
def test_no_task_starts_before_what_it_needs(
    pipeline: Pipeline, draws: list[float], data: st.DataObject
) -> None:
    """With any times: not before the device is free, nor before a message has come."""
    chunks = pipeline.chunks
    sends = [data.draw(st.floats(0, 3)) for _ in range(chunks - 1)]
    returns = [data.draw(st.floats(0, 3)) for _ in range(chunks - 1)]

    def task_us(task: Task) -> float:
        return draws[(3 * task.chunk + 5 * task.microbatch + task.backward) % len(draws)]

    events = simulate(pipeline, task_us, sends, returns)
    ends = {event.task: event.end_us for row in events for event in row}
    for device, row in enumerate(events):
        assert [event.task for event in row] == pipeline.tasks(device)
        free = 0.0
        for event in row:
            task = event.task
            assert event.end_us == pytest.approx(event.start_us + task_us(task))
            needed = [free]
            if not task.backward and task.chunk:
                needed.append(
                    ends[Task(False, task.chunk - 1, task.microbatch)] + sends[task.chunk - 1]
                )
            if task.backward:
                needed.append(ends[Task(False, task.chunk, task.microbatch)])
                if task.chunk < chunks - 1:
                    after = ends[Task(True, task.chunk + 1, task.microbatch)]
                    needed.append(after + returns[task.chunk])
            assert event.start_us == pytest.approx(max(needed))
            free = event.end_us


@given(pipelines, st.lists(st.integers(0, 50), min_size=15, max_size=15), st.integers(0, 400))
def test_memory_is_bounded_by_what_is_in_flight(
    pipeline: Pipeline, kept: list[int], available: int
) -> None:
    """Also where some microbatches keep all: these take no more than what was left."""
    needs = [Need(kept=kept[c], working=kept[-1 - c]) for c in range(pipeline.chunks)]
    whole = [Need(kept=2 * n.kept + 3, working=n.working // 2) for n in needs]
    for device in range(pipeline.pp):
        tasks = pipeline.tasks(device)
        own = range(device, pipeline.chunks, pipeline.pp)
        plain = usage_of(tasks, needs)
        most = max(needs[c].kept for c in own)
        working = max(needs[c].working for c in own)
        assert plain.peak_bytes <= plain.in_flight * most + working
        assert plain.peak_bytes == plain.kept_bytes + plain.working_bytes
        assert not plain.whole
        some = usage_of(tasks, needs, whole=whole, available_bytes=available)
        assert some.peak_bytes <= max(available, plain.peak_bytes)
        if available >= usage_of(tasks, whole).peak_bytes + working + plain.peak_bytes:
            assert len(some.whole) == len(tasks) // 2


def test_microbatches_that_keep_all_move_on() -> None:
    """A finished one's room goes to the next: appendix C's moving window."""
    pipeline = Pipeline(pp=4, microbatches=8)
    needs, whole = [Need(kept=1, working=0)] * 4, [Need(kept=3, working=0)] * 4
    found = usage_of(pipeline.tasks(0), needs, whole=whole, available_bytes=8)
    assert found.peak_bytes == 8  # two of four in flight keep all
    assert sorted(m for _, m in found.whole) == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"pp": 0}, "pp must be at least 1"),
        ({"interleave": 2}, "interleave=2 needs pp of at least 2"),
        ({"pp": 4, "interleave": 2, "microbatches": 3}, "multiple of pp=4, not 3; legal: 4, ..."),
    ],
)
def test_numbers_without_a_schedule(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pipeline(**numbers)
