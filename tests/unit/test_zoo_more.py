"""More models: the rewritten one is the original, on simulated ranks."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from torch import nn

from graphpar.ops import is_conversion
from graphpar.passes.rules import rule_for
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, is_getitem
from graphpar.testing import compare
from graphpar.trace import trace
from graphpar.unfuse import unfused
from tests import zoo
from tests.zoo.precise import float64_inside

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")


@functools.lru_cache(maxsize=1)
def traced(name: str) -> tuple[nn.Module, dict[str, Any], Program]:
    model, kwargs = zoo.build_double(name)
    with float64_inside():
        return model, kwargs, trace(model, (), kwargs)


@pytest.mark.parametrize(
    ("tp", "sp"),
    [
        (2, True),
        (4, False),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(4, True, marks=pytest.mark.long),
    ],
)
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


DENSE_DECODERS = ["opt", "bloom", "mistral", "qwen2", "gemma", "phi", "gptj", "gpt_neox"]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", DENSE_DECODERS)
def test_dense_decoders_have_the_papers_collectives(name: str, sp: bool) -> None:
    """Korthikanti et al. 2022, figures 4 and 5; parallel branches share their gather."""
    _, _, program = traced(name)
    last = list(run_pipeline(program, default_pipeline(tp=2, sp=sp, rng="exact")).values())[-1]
    (block,) = unfused(last).blocks.values()
    found = Counter(
        str(n.target._schema.name).split("::")[1]
        for n in block.nodes
        if is_conversion(n.target) and n.args[0].op != "get_attr"
    )
    if sp:
        assert found["reduce_scatter"] == 2
        assert 1 <= found["all_gather"] <= 2
        assert set(found) <= {"reduce_scatter", "all_gather", "shard"}  # a constant is cut
    else:
        assert found["all_reduce"] == 2
        assert set(found) <= {"all_reduce", "convert"}
