"""Plans of a training step: what they count, against the model itself and against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from graphpar.cost import HARDWARE, Roofline, dry_run
from graphpar.errors import InputError
from graphpar.memory import step_memory
from graphpar.passes.apply_recompute import apply_recompute
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.plan import (
    ADAMW,
    MIXED_ADAM,
    Pipeline,
    Planner,
    Setup,
    StepPlan,
    chrome_trace,
    memory_svg,
)
from graphpar.plan.chunk import Coster
from graphpar.plan.curve import memory_curve
from graphpar.plan.deal import deal, dealt_paths, messages, send_us
from graphpar.plan.svg import _ticks
from graphpar.program import Program
from graphpar.trace import trace
from tests.unit.paper import paper

SIZE = paper.Size(a=4, b=2, h=32, l=4, s=16, t=2)
VOCABULARY = 64
HOST = HARDWARE["a100-80gb"]


@pytest.fixture(scope="module")
def programs() -> dict[bool | None, Program]:
    """The whole program (``None``), and that of two ranks without and with sp."""
    with torch.device("meta"):
        module = paper.GPT(SIZE, vocabulary=VOCABULARY).bfloat16()
        tokens, labels = torch.zeros(2, SIZE.s, SIZE.b, dtype=torch.long)
    traced = trace(module, (tokens, labels), {})
    found: dict[bool | None, Program] = {}
    for sp in (False, True):
        stages = run_pipeline(traced, default_pipeline(tp=2, sp=sp))
        found[sp] = list(stages.values())[-1]
        found[None] = stages["outline"]
    return found


def planner(programs: dict[bool | None, Program], sp: bool = True, **options: object) -> Planner:
    setup = Setup(hardware=HOST, tp=2, **options)  # type: ignore[arg-type]
    return Planner(programs[None], programs[sp], setup)


def test_flops_are_those_of_the_paper(programs: dict[bool | None, Program]) -> None:
    """Appendix A: 72BLsh²(1 + s/6h + v/12hL)."""
    b, h, layers, s = SIZE.b, SIZE.h, SIZE.l, SIZE.s
    wanted = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + VOCABULARY / (12 * h * layers))
    plan = planner(programs)
    assert plan.model_flops == wanted
    assert plan.dtype == torch.bfloat16
    step = plan.step("none")
    assert step.mfu == step.hfu
    assert step.mfu == pytest.approx(wanted / (step.iteration_us * 2 * 312e6))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_peak_is_that_of_a_replayed_step(
    programs: dict[bool | None, Program], mode: str
) -> None:
    plan = planner(programs)
    step = plan.step(mode)
    stage = step.stages[0]
    program = programs[True] if mode == "none" else apply_recompute(plan.marked(mode))
    run = step_memory(program, trained_inputs=())
    assert stage.activation_bytes == dry_run(program).saved_bytes
    found = stage.peak_bytes - stage.optimizer_bytes
    # The plan has all gradients throughout; a first backward makes them one by one.
    assert run.peak_bytes <= found + run.input_bytes
    assert found - run.peak_bytes <= run.gradient_bytes


def test_time_adds_up(programs: dict[bool | None, Program]) -> None:
    """One stage, three microbatches: all work in turn, then the optimizer."""
    alone = planner(programs).step("full")
    step = planner(programs, pipeline=Pipeline(microbatches=3)).step("full")
    stage, once = step.stages[0], alone.stages[0]
    assert stage.forward_us == pytest.approx(3 * once.forward_us)
    assert stage.replay_us == pytest.approx(3 * once.replay_us)
    assert stage.backward_us > 3 * once.backward_us  # gradients are added up
    total = stage.forward_us + stage.backward_us + stage.replay_us + stage.optimizer_us
    assert step.iteration_us == pytest.approx(total)
    assert step.bubble == pytest.approx(0)
    assert step.hfu > step.mfu


def test_stages_share_out_the_model(programs: dict[bool | None, Program]) -> None:
    whole = planner(programs).step("none")
    step = planner(programs, pipeline=Pipeline(pp=2, microbatches=4)).step("none")
    table = 2 * VOCABULARY // 2 * SIZE.h  # on both ends: bytes on a rank
    parameters = [stage.parameter_bytes for stage in step.stages]
    assert sum(parameters) == whole.stages[0].parameter_bytes + table
    assert all(stage.gradient_sync_us > 0 for stage in step.stages)  # of the table
    assert [stage.in_flight for stage in step.stages] == [2, 1]
    first, last = step.chunks
    assert first.kept_bytes + last.kept_bytes == whole.chunks[0].kept_bytes
    assert step.stages[0].activation_bytes == 2 * first.kept_bytes


def test_what_stages_send(programs: dict[bool | None, Program]) -> None:
    """The residual stream: 2sbh bytes, over t if it is sharded; seeds have no gradient."""
    sbh = SIZE.s * SIZE.b * SIZE.h
    for sp in (False, True):
        local = programs[sp]
        parts = deal(dry_run(local), dealt_paths(local), 4)
        for message in messages(parts):
            stream = 2 * sbh // (2 if sp else 1)
            gradients = message.sharded_gradient_bytes, message.whole_gradient_bytes
            assert gradients == ((stream, 0) if sp else (0, stream))
            sent = message.sharded_bytes + message.whole_bytes
            assert stream < sent <= stream + 16 * SIZE.l


def test_a_whole_value_is_sent_in_parts() -> None:
    times = Roofline(hardware=HOST)
    big = 100_000_000
    parts = send_us(times, 0, big, tp=8, stride=8)
    assert parts < send_us(times, big, 0, tp=8, stride=8) / 2
    assert parts > send_us(times, big // 8, 0, tp=8, stride=8)
    assert send_us(times, 0, 16, tp=8, stride=8) == send_us(times, 16, 0, tp=8, stride=8)


def test_auto_keeps_each_stage_in_the_budget(programs: dict[bool | None, Program]) -> None:
    """Less room is never faster."""
    pipeline = Pipeline(pp=2, interleave=2, microbatches=2)
    none = planner(programs, pipeline=pipeline).step("none")
    full = planner(programs, pipeline=pipeline).step("full")
    most, least = none.fullest.peak_bytes, full.fullest.peak_bytes
    rows = []
    for part in (1.0, 0.3):
        budget = int(least + part * (most - least))
        step = planner(programs, pipeline=pipeline, budget_bytes=budget).step("auto")
        assert step.fits
        assert step.fullest.peak_bytes <= budget
        rows.append(step)
    assert rows[0].stages == none.stages
    for more, less in pairwise(rows):
        assert less.iteration_us >= more.iteration_us
    assert rows[-1].stages[0].replay_us > 0


def test_auto_says_what_would_fit(programs: dict[bool | None, Program]) -> None:
    pipeline = Pipeline(pp=2, microbatches=2)
    plan = planner(programs, pipeline=pipeline, budget_bytes=1000, optimizer=MIXED_ADAM)
    with pytest.raises(InputError, match="too small: the least that works is") as told:
        plan.step("auto")
    assert "on stage 0 of 2" in told.value.__notes__
    assert "optimizer states take" in told.value.__notes__[0]
    least = int(str(told.value).split("works is ")[1].split()[0])
    plan = planner(programs, pipeline=pipeline, budget_bytes=least, optimizer=MIXED_ADAM)
    assert plan.step("auto").fullest.peak_bytes <= least


@pytest.fixture(scope="module")
def drawn(programs: dict[bool | None, Program]) -> StepPlan:
    pipeline = Pipeline(pp=2, interleave=2, microbatches=4)
    budget = planner(programs, pipeline=pipeline).step("none").fullest.peak_bytes
    plan = planner(programs, dp=2, pipeline=pipeline, budget_bytes=budget, whole_microbatches=True)
    return plan.step("full")


def test_the_curve_reaches_the_peak(drawn: StepPlan) -> None:
    assert drawn.usages[0].whole
    for device, stage in enumerate(drawn.stages):
        samples = memory_curve(drawn, device)
        most = max(s.activation_bytes + s.transient_bytes for s in samples)
        assert most == stage.peak_bytes - stage.state_bytes
        assert samples[-1].activation_bytes == 0
        assert all(a.start_us <= b.start_us + 1e-6 for a, b in pairwise(samples))


def test_the_optimizer_is_part_of_the_setup(programs: dict[bool | None, Program]) -> None:
    """Adam in 32 bits: of a parameter's 2 bytes 12 of states, 4 of its gradient, 58 of traffic."""
    times = Roofline(hardware=replace(HOST, launch_us=0.0))
    own, mixed = (
        planner(programs, optimizer=each, times=times, dp=2).step("none").stages[0]
        for each in (ADAMW, MIXED_ADAM)
    )
    count = own.parameter_bytes // 2
    assert mixed.optimizer_bytes - own.optimizer_bytes == (12 - 4) * count
    assert mixed.gradient_bytes == 4 * count
    assert mixed.peak_bytes - own.peak_bytes == (16 - 6) * count
    assert mixed.optimizer_us == pytest.approx(58 * count / HOST.memory_bytes_per_us)
    assert mixed.gradient_sync_us > own.gradient_sync_us
    least = own.state_bytes + own.activation_bytes + own.transient_bytes
    with pytest.raises(InputError, match="the least that works"):
        planner(programs, optimizer=MIXED_ADAM, budget_bytes=least).step("auto")


def test_gradients_are_added_in_the_optimizers_type(programs: dict[bool | None, Program]) -> None:
    """Of its own type those of all but the first microbatch; in 32 bits those of each, to zeros."""
    times = Roofline(hardware=replace(HOST, launch_us=0.0))
    for optimizer, nbytes in ((ADAMW, (0, 6, 12)), (MIXED_ADAM, (10, 20, 30))):
        for count, moved in enumerate(nbytes, 1):
            pipeline = Pipeline(microbatches=count)
            plan = planner(programs, optimizer=optimizer, times=times, pipeline=pipeline)
            step = plan.step("none")
            stage, once = step.stages[0], step.chunks[0].work.backward_us
            us = moved * stage.parameter_bytes / 2 / HOST.memory_bytes_per_us
            assert stage.backward_us - count * once == pytest.approx(us, abs=1e-6)
            end = step.events[0][-1].end_us
            assert end == pytest.approx(stage.forward_us + stage.backward_us)


def test_an_optimizer_is_for_parameters_of_one_type(programs: dict[bool | None, Program]) -> None:
    local = programs[True]
    name = next(name for name, s in local.state.items() if s.kind == "parameter")
    known = local.state[name]
    wide = replace(known, spec=replace(known.spec, dtype=torch.float32))
    other = {True: replace(local, state={**local.state, name: wide}), None: programs[None]}
    with pytest.raises(InputError, match=f"is for parameters of 16 bits, but {name} is float32"):
        planner(other, optimizer=MIXED_ADAM)


@pytest.mark.parametrize("send_us", [None, 1000.0])
def test_the_trace_has_the_form_of_chrome_trace_events(
    drawn: StepPlan, send_us: float | None
) -> None:
    """Trace Event Format (Google), JSON object form: the fields of each kind of event; on each
    thread complete events in order, beside or within each other to the nanosecond (Perfetto drops
    others); the messages, which may overlap, as asynchronous events."""
    if send_us is not None:  # longer than tasks
        drawn = replace(drawn, forward_send_us=(send_us,) * 3, backward_send_us=(send_us,) * 3)
    text = json.dumps(chrome_trace(drawn), allow_nan=False)
    found = json.loads(text, parse_float=Decimal)
    assert found["displayTimeUnit"] in ("ms", "ns")
    fields = {
        "M": {"ph", "pid", "name", "args"},
        "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
        "C": {"ph", "pid", "name", "ts", "args"},
        "b": {"ph", "pid", "tid", "name", "cat", "id2", "ts", "args"},
        "e": {"ph", "pid", "tid", "name", "cat", "id2", "ts", "args"},
    }
    begun: dict[Any, Decimal] = {}
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        assert event.keys() - {"tid"} == fields[event["ph"]] - {"tid"}
        assert isinstance(event["name"], str)
        numbers = [event[key] for key in ("pid", "tid") if key in event]
        assert all(type(n) is int and n > 0 for n in numbers)
        for us in (event.get("ts", 0), event.get("dur", 0)):
            assert us >= 0
            assert us * 1000 % 1 == 0
        if event["ph"] == "C":
            assert all(type(n) is int and n >= 0 for n in event["args"].values())
        if event["ph"] == "b":
            begun[event["pid"], event["name"], event["id2"]["local"]] = event["ts"]
        elif event["ph"] == "e":
            key = event["pid"], event["name"], event["id2"]["local"]
            assert event["ts"] >= begun.pop(key)
        elif event["ph"] != "M":
            threads.setdefault((event["pid"], event.get("tid", "memory")), []).append(event)
    named = {(e["pid"], e["tid"]) for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert not begun
    assert {key for key in threads if key[1] != "memory"} == named
    assert len({tid for _, tid in named}) == len(named)
    for events in threads.values():
        open_ends: list[Decimal] = []
        for before, after in pairwise([{"ts": 0}, *events]):
            assert after["ts"] >= before["ts"]
            while open_ends and open_ends[-1] <= after["ts"]:
                open_ends.pop()
            end = after["ts"] + after.get("dur", 0)
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_the_trace_is_the_timeline(drawn: StepPlan) -> None:
    trace_events = json.loads(json.dumps(chrome_trace(drawn)))["traceEvents"]
    assert {e["ph"] for e in trace_events} == {"M", "X", "C", "b", "e"}
    for device, row in enumerate(drawn.events):
        mine = [e for e in trace_events if e["pid"] == device + 1]
        work = [e for e in mine if e["ph"] == "X"]
        tasks = [e for e in work if e["cat"] in ("forward", "backward")]
        assert len(tasks) == len(row) == 16
        assert [e["name"] for e in work[len(tasks) :]] == ["gradient all-reduce", "optimizer"]
        for before, after in pairwise(work):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6
        assert all(e["dur"] >= 0 for e in work)
        sends = [e for e in mine if e["ph"] == "b"]
        assert len(sends) == 12  # all but the last forward and backward of each microbatch
        assert {e["cat"] for e in sends} == {"send"}
        assert any(e["args"].get("keeps all") for e in tasks) == bool(drawn.usages[device].whole)


def test_the_picture_has_the_peak(drawn: StepPlan) -> None:
    text = memory_svg(drawn, 0, "a < b")
    assert "a &lt; b" in text
    assert text.count("<polygon") == 5  # no buffers
    assert "buffers" not in text
    root = ElementTree.fromstring(text)
    texts = [x.text for x in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(str(x).startswith("budget ") for x in texts)


@pytest.mark.parametrize("most", [0.7, 1, 2.99, 3, 5, 5.99, 6, 14.9, 15, 29.9, 30, 845.2, 1024])
def test_ticks_are_round(most: float) -> None:
    found = _ticks(most)
    assert 4 <= len(found) <= 8
    assert found[0] == 0
    assert most - found[1] < found[-1] * (1 + 1e-9) <= most * (1 + 2e-9)
    assert f"{found[1]:g}"[-1] in "125" or found[1] >= 10


def test_equal_units_are_costed_once(programs: dict[bool | None, Program]) -> None:
    local = programs[True]
    run = dry_run(local, backward=True)
    coster = Coster(local, Roofline(hardware=HOST))
    chunk = coster.chunk(run)
    layers = [unit for unit in chunk.units if unit.name.startswith("layers")]
    assert len(layers) == SIZE.l
    assert len({(unit.work, unit.working_bytes) for unit in layers}) == 1
    assert sum(unit.kept_bytes for unit in chunk.units) == run.saved_bytes
    more = coster.chunk(replace(run, steps=run.steps[:1]))
    assert more.kept_bytes <= chunk.kept_bytes
