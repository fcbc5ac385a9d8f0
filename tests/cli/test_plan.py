"""What plan prints: a row for each choice, JSON, what fits, where figures come from."""

from __future__ import annotations

import json

from graphpar.cost import dry_run
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.trace import trace
from tests.cli.conftest import MODELS, Command
from tests.cli.models import mlp

MLP = f"{MODELS}:mlp"


def test_a_row_for_each_choice(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--sp")
    assert found.code == 0
    rows = [line.split()[0] for line in found.out.splitlines()]
    assert rows == ["recompute", "none", "selective", "full", "auto"]
    assert "h100, budget 79.65 GiB per device" in found.err
    assert "memory_bytes_per_us: NVIDIA H100 data sheet" in found.err


def test_json(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--json", "--hardware", "a100-40gb")
    data = json.loads(found.out)
    assert (data["tp"], data["hardware"], data["budget_bytes"]) == (2, "a100-40gb", 40 * 2**30)
    none, *_, auto = data["choices"]
    assert [each["recompute"] for each in data["choices"]] == ["none", "selective", "full", "auto"]
    stages = run_pipeline(trace(*mlp()), default_pipeline(tp=2))
    assert none["kept_bytes"] == dry_run(list(stages.values())[-1]).saved_bytes
    assert auto["kept_bytes"] == none["kept_bytes"]  # there is room
    for each in data["choices"]:
        state = sum(each[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer"))
        assert each["total_bytes"] >= state + each["kept_bytes"] + each["transient_bytes"]
        assert each["fits"]


def test_what_does_not_fit(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--budget", "1KiB")
    assert found.code == 0
    assert found.out.count("(does not fit)") == 3
    assert "auto: memory_budget of 1024 B (1024 bytes) is too small: the least" in found.err


def test_the_tensors_of_a_choice(graphpar: Command) -> None:
    found = graphpar("plan", MLP, "--tp", 2, "--report", "full")
    assert "recompute 'full', no budget:" in found.err
    assert "  again " in found.err
    assert "  keep  " in found.err


def test_bad_input(graphpar: Command) -> None:
    for rest, message in (
        (("--hardware", "abacus"), "no hardware is named 'abacus'"),
        (("--budget", "much"), "cannot read 'much' as bytes"),
    ):
        found = graphpar("plan", MLP, "--tp", 2, *rest)
        assert found.code == 2
        assert message in found.err
