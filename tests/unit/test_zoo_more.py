"""More models: the rewritten one is the original, on simulated ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from graphpar.passes.rules import rule_for
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, is_getitem
from graphpar.testing import compare
from graphpar.trace import trace
from tests import zoo
from tests.zoo.precise import float64_inside

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")


@functools.lru_cache(maxsize=1)
def traced(name: str) -> tuple[nn.Module, dict[str, Any], Program]:
    model, kwargs = zoo.build_double(name)
    with float64_inside():
        return model, kwargs, trace(model, (), kwargs)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", sorted(zoo.MORE))
def test_rewritten_model_is_the_original(name: str, tp: int, sp: bool) -> None:
    model, kwargs, program = traced(name)
    stages = run_pipeline(program, default_pipeline(tp=tp, sp=sp, rng="exact"))
    tolerance = 1e-4 if name in zoo.FLOAT32_ONLY else 1e-10
    with float64_inside():
        compare(stages["localize"], model, (), kwargs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", sorted({*zoo.BUILDERS, *zoo.MORE} - {"lstm"}))
def test_every_op_has_a_rule(name: str) -> None:
    _, _, program = traced(name)
    calls = [n for n in program.graph.nodes if n.op == "call_function" and not is_getitem(n)]
    assert {str(n.target) for n in calls if rule_for(n.target) is None} == set()
