"""Recomputation chosen and acted on: bytes, FLOPs and collectives as planned, equal gradients."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.cost import Roofline, dry_run, find_hardware
from graphpar.interpret import model_state
from graphpar.passes.apply_recompute import apply_recompute, graph_runs
from graphpar.passes.apply_recompute.regions import replayable
from graphpar.passes.choose_recompute import ChooseRecompute, RecomputeReport, choose_recompute
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, annotate, copy_program, info, program_hash
from graphpar.trace import flatten, trace
from tests import zoo
from tests.unit.recompute_checks import check, train

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")

FAST = Roofline(hardware=replace(find_hardware("h100"), launch_us=0.0))
"""The models are small: with the cost of launches every op would cost the same."""


@functools.cache
def partitioned(name: str, tp: int, rng: str, layers: int = 2) -> tuple[Program, Any, Any]:
    model, kwargs = zoo.build(name, layers=layers)
    stages = run_pipeline(trace(model, (), kwargs), default_pipeline(tp=tp, sp=True, rng=rng))
    return list(stages.values())[-1], model_state(model), flatten((), kwargs)[0]


SETTINGS = [
    ("nanogpt", 2, "per-rank"),
    ("gpt2", 1, "exact"),
    *(
        pytest.param(*setting, marks=pytest.mark.long)
        for setting in (
            ("nanogpt", 1, "invariant"),
            ("gpt2", 2, "exact"),
            ("llama", 2, "invariant"),
            ("t5", 4, "per-rank"),
            ("mixtral", 2, "exact"),
            ("bert", 4, "invariant"),
            ("deberta", 1, "per-rank"),
            ("lstm", 2, "exact"),
        )
    ),
]


@pytest.mark.parametrize(("name", "tp", "rng"), SETTINGS)
def test_any_nodes_may_run_again(name: str, tp: int, rng: str) -> None:
    """Random choices: regions that are no paths, masks among them, paths that come back."""
    program, state, leaves = partitioned(name, tp, rng)
    plain = train(program, state, leaves)
    pick = random.Random(name)
    for share in (0.1, 0.5):
        marked = copy_program(program)
        for _, graph in marked.graphs():
            for node in graph.nodes:
                if replayable(node) and pick.random() < share:
                    annotate(node, replay=True)
        check(apply_recompute(marked), plain, state, leaves)


class Cross(nn.Module):
    """Reads a memory twice, as cross-attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k = self.k(memory)
        v = self.v(memory)
        return x + k.sin() * v  # type: ignore[no-any-return]


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Cross() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        for block in self.blocks:
            x = block(x, memory)
        return x.square().mean()


def test_gradients_of_what_blocks_share_are_summed_in_their_order() -> None:
    torch.manual_seed(0)
    model, x = Crossed(), torch.randn(8, 16)
    program = list(run_pipeline(trace(model, (x,), {}), default_pipeline(tp=1)).values())[-1]
    plain = train(program, model_state(model), [x])
    marked = copy_program(program)
    ((_, block),) = marked.blocks.items()
    first = next(n for n in block.nodes if n.target is torch.ops.aten.linear.default)
    annotate(first, replay=True)  # its region ends after the second product
    check(apply_recompute(marked), plain, model_state(model), [x])


@pytest.mark.parametrize(("name", "tp", "rng"), SETTINGS)
def test_plans_are_executed_as_they_were_made(name: str, tp: int, rng: str) -> None:
    program, state, leaves = partitioned(name, tp, rng)
    plain = train(program, state, leaves)
    sizes = [plain.saved_bytes]
    for mode in ("selective", "full"):
        chosen = choose_recompute(program, ChooseRecompute(mode=mode, times=FAST))
        found = check(apply_recompute(chosen), plain, state, leaves)
        assert found.saved_bytes == chosen.report["recompute"].saved_bytes
        sizes.append(found.saved_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.6 * sizes[0] or not program.blocks


def test_full_keeps_the_inputs_of_blocks() -> None:
    """Korthikanti et al. 2022, table 2, last row: 2sbh for a layer, here of 4-byte numbers."""
    sizes = []
    for layers in (2, 5):
        program = partitioned("nanogpt", 1, "invariant", layers)[0]
        chosen = apply_recompute(choose_recompute(program, ChooseRecompute(mode="full")))
        sizes.append(dry_run(chosen).saved_bytes)
    stream, seed = 4 * zoo.BATCH * zoo.SEQ * zoo.WIDTH, 16
    assert sizes[1] - sizes[0] == 3 * (stream + seed)


def test_a_budget_that_nothing_fits_names_the_least() -> None:
    program = partitioned("nanogpt", 1, "invariant")[0]
    with pytest.raises(ValueError, match=r"the least that works is \d+ bytes") as error:
        choose_recompute(program, ChooseRecompute(budget_bytes=1000))
    least = int(str(error.value).split("works is ")[1].split(" ")[0])
    chosen = choose_recompute(program, ChooseRecompute(budget_bytes=least))
    report = chosen.report["recompute"]
    assert report.saved_bytes + report.transient_bytes + report.state_bytes == least
    with pytest.raises(ValueError, match=f"the least that works is {least} bytes"):
        choose_recompute(program, ChooseRecompute(budget_bytes=least - 1))


def reported(program: Program, mode: str) -> RecomputeReport:
    chosen = choose_recompute(program, ChooseRecompute(mode=mode, times=FAST))  # type: ignore[arg-type]
    found: RecomputeReport = chosen.report["recompute"]
    return found


@functools.cache
def sixteen() -> tuple[Program, int]:
    """Sixteen equal blocks, and the budget that no recomputation needs."""
    program = partitioned("nanogpt", 1, "invariant", 16)[0]
    report = reported(program, "selective")
    assert report.none_bytes == dry_run(program).saved_bytes
    return program, report.state_bytes + report.none_bytes


def test_kept_bytes_follow_the_budget() -> None:
    """C51: they never rise as it falls, and never exceed it."""
    program, most = sixteen()
    before = most
    replay_us = 0.0
    infeasible = False
    for percent in (100, 92, 85, 78, 70, 40, 20, 5):
        report = None
        budget = most * percent // 100
        try:
            chosen = choose_recompute(program, ChooseRecompute(budget_bytes=budget))
            report = chosen.report.get("recompute")
        except ValueError:
            infeasible = True
            continue
        assert not infeasible  # once nothing fits, nothing smaller does
        assert report is not None
        total = report.saved_bytes + report.transient_bytes + report.state_bytes
        assert total <= budget
        assert report.saved_bytes <= before
        assert report.replay_us >= replay_us
        before, replay_us = report.saved_bytes, report.replay_us
    assert infeasible


def test_the_exact_bytes_of_no_recomputation_fit() -> None:
    """C53: and one byte less is the next plan, not an error."""
    program, most = sixteen()
    exact = choose_recompute(program, ChooseRecompute(budget_bytes=most)).report["recompute"]
    assert (exact.replay_us, exact.saved_bytes) == (0.0, exact.none_bytes)
    less = choose_recompute(program, ChooseRecompute(budget_bytes=most - 1)).report["recompute"]
    assert 0 < less.replay_us < less.forward_us / 10
    assert less.saved_bytes + less.transient_bytes + less.state_bytes <= most - 1


def test_the_report_names_tensors_and_lines() -> None:
    program, _ = sixteen()
    chosen = choose_recompute(program, ChooseRecompute(mode="selective", times=FAST))
    report = chosen.report["recompute"]
    block, root = report.plans
    assert (block.calls, root.block) == (16, "")
    applied = apply_recompute(chosen)
    run = graph_runs(applied, dry_run(applied))["blocks"]
    assert sum(row.nbytes for row in block.saved) == sum(run.storages[s].nbytes for s in run.saved)
    assert {row.name for row in block.replayed} <= {step.node.name for step in run.steps}
    assert sum(row.us for row in block.replayed) == pytest.approx(block.replay_us, rel=0.3)
    assert all("own.py:" in row.source for row in block.replayed)
    text = str(report)
    assert "× 16" in text
    assert "gap to the bound 0.000%" in text


def test_a_plan_is_part_of_what_ranks_compare() -> None:
    """C55: it follows from the program, and programs with different plans differ in their hash."""
    program, _ = sixteen()
    once, again = (choose_recompute(program, ChooseRecompute(mode="full")) for _ in range(2))
    other = choose_recompute(program, ChooseRecompute(mode="selective", times=FAST))
    assert program_hash(once) == program_hash(again) != program_hash(other)
    assert program_hash(program) not in (program_hash(once), program_hash(other))


def test_regions_are_consecutive_and_hold_a_consumer() -> None:
    program, _ = sixteen()
    options = ChooseRecompute(mode="selective", times=FAST)
    chosen = apply_recompute(choose_recompute(program, options))
    (block,) = chosen.blocks.values()
    regions = [info(n).region for n in block.nodes]
    found = [r for r, before in zip(regions, [None, *regions], strict=False) if r != before and r]
    assert len(found) == len(set(found)) > 0
    for region in found:
        nodes = [n for n in block.nodes if info(n).region == region]
        assert any(info(n).replay for n in nodes)
        assert not all(info(n).replay for n in nodes)
