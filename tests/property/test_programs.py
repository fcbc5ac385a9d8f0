"""Random programs: the rewritten model is the model, outputs and all gradients, on every rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from torch import nn

from graphpar.cost import CostModel
from graphpar.passes.outline import outline
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.testing import compare
from graphpar.trace import bind, trace
from graphpar.types import Type
from tests.property.pick import Seeded
from tests.property.program_nets import Body, Input, Step
from tests.property.programs import Program, programs, random_program
from tests.unit.trace_checks import assert_same_program

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")

LONG_CHUNKS, LONG_EXAMPLES = 100, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCost(CostModel):
    """Prices that make the planner choose unusual plans: any op may be dear in any form, any
    conversion next to free."""

    source: random.Random = field(default_factory=random.Random)
    conversions: float = 1.0

    def op_us(self, flops: int, nbytes: int) -> float:
        return self.source.choice((0.1, 1.0, 10.0))

    def conversion_us(
        self, source: Type, target: Type, nbytes: int, ranks: int, *, differentiable: bool
    ) -> float:
        return self.conversions * self.source.random()


def costs(number: int) -> Sequence[CostModel]:
    """Other plans than the usual: skewed prices, and random ones."""
    choose = random.Random(number)
    skewed = CostModel(
        latency_us=choose.choice((0.0, 1e4)),
        link_bytes_per_us=choose.choice((1e-1, 1e9)),
        flops_per_us=choose.choice((1e-1, 1e9)),
        memory_bytes_per_us=choose.choice((1e-1, 1e9)),
        saved_us_per_byte=choose.choice((0.0, 10.0)),
    )
    return skewed, RandomCost(source=random.Random(number), conversions=choose.choice((1e-3, 1.0)))


def check(program: Program) -> None:
    """What :func:`graphpar.testing.assert_equivalent` does, for two plans of one trace: with the
    model's own masks, then with those that a seed gives on any number of ranks ("per-rank" at
    times, where there are none)."""
    model, args, kwargs = program.build()
    bound = bind(model, args, kwargs)
    traced = trace(model, *bound)
    other = costs(program.seed)[program.seed % 3 > 0]
    plans = ((program.sp, None, "exact"), (not program.sp, other, "invariant"))
    for sp, cost, rng in plans:
        pipeline = default_pipeline(tp=program.tp, sp=sp, cost=cost, rng=rng)
        *_, unseeded, rewritten = run_pipeline(traced, pipeline).values()
        alone = None
        if rng == "invariant" and rewritten is unseeded and program.seed % 4 == 0:
            pipeline = default_pipeline(tp=program.tp, sp=sp, cost=cost, rng="per-rank")
            rewritten = list(run_pipeline(traced, pipeline).values())[-1]
        elif rng != "exact" and rewritten is not unseeded:
            alone = list(run_pipeline(traced, default_pipeline(tp=1, rng=rng)).values())[-1]
        try:
            compare(rewritten, model, args, kwargs, atol=1e-10, rtol=1e-10, reference=alone)
        except AssertionError as error:
            error.add_note(f"tp={program.tp}, sp={sp}, cost={cost}")
            raise


MEAN_OVER_A_SHARDED_AXIS = Program(
    inputs=(Input("grad", (2, 4, 6)),),
    body=Body(
        steps=(Step("linear", (0,), {"out": 8}), Step("norm", (1,), {"form": "by_hand"})),
        outputs=(2,),
    ),
    tp=2,
    seed=2,
)

DOUBLED = Program(
    inputs=(Input("grad", (2, 4, 6)),),
    body=Body(
        steps=(
            Step("linear", (0,), {"out": 8, "bias": True, "form": "module"}),
            Step("pair", (1, 1), {"form": "add"}),
        ),
        outputs=(2,),
    ),
    tp=2,
    seed=0,
)


GROUPS_OF_ONE_IMAGE = Program(
    inputs=(Input("grad", (1, 4, 2)),),
    body=Body(
        steps=(
            Step("linear", (0,), {"out": 2, "bias": False, "form": "transposed"}),
            Step("image", (1,), {"form": "group", "rows": 2}),
        ),
        outputs=(1, 2),
    ),
    tp=2,
    seed=740,
)


GROUPS_AFTER_DROPPED_ATTENTION = Program(
    inputs=(Input("grad", (1, 8, 6)),),
    body=Body(
        steps=(
            Step(
                "attention",
                (0,),
                {
                    "heads": 3,
                    "kv_heads": 3,
                    "d": 2,
                    "core": "sdpa",
                    "projection": "apart",
                    "group": "expand",
                    "view": "unflatten",
                    "norm": "",
                    "rotary": "",
                    "bias": False,
                    "p": 0.2,
                    "added": "",
                    "cache": "",
                },
            ),
            Step("image", (1,), {"form": "group", "rows": 2}),
        ),
        outputs=(2,),
    ),
    tp=2,
    seed=1,
)


@example(DOUBLED)
@example(GROUPS_AFTER_DROPPED_ATTENTION)
@example(GROUPS_OF_ONE_IMAGE)
@example(MEAN_OVER_A_SHARDED_AXIS)
@given(program=programs())
def test_random_programs_are_equivalent(program: Program) -> None:
    check(program)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(LONG_CHUNKS))
def test_many_random_programs_are_equivalent(chunk: int) -> None:
    """Drawn without hypothesis, which would repeat and vary what it has drawn."""
    failures: list[Exception] = []
    for number in range(chunk * LONG_EXAMPLES, (chunk + 1) * LONG_EXAMPLES):
        program = random_program(Seeded(number))
        try:
            check(program)
        except Exception as error:
            error.add_note(f"random_program(Seeded({number})): {program}")
            failures.append(error)
            print(f"program {number}: {error}")
    print(f"{LONG_EXAMPLES - len(failures)} programs without a mismatch")
    if failures:
        raise ExceptionGroup(f"{len(failures)} programs", failures)


class Thrice(nn.Module):
    """A random program as two layers that may do the same, one of them called again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return [layer(*args, **kwargs) for layer in (*self.layers, self.layers[1])]


def check_traced_once(program: Program) -> int:
    """How many layers were folded."""
    layer, args, kwargs = program.build()
    model = Thrice(layer)
    flat = trace(model, args, kwargs, mode="flat")
    once = trace(model, args, kwargs)
    assert_same_program(flat, once)
    assert_same_program(outline(flat), outline(once))
    return len(once.report["trace"].folded)


@pytest.mark.parametrize("number", [*range(6), 82])  # 82: a constant with strides
def test_random_layers_are_traced_once(number: int) -> None:
    check_traced_once(random_program(Seeded(number)))


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(6))
def test_many_random_layers_are_traced_once(chunk: int) -> None:
    numbers = range(chunk * 20, (chunk + 1) * 20)
    folded = [check_traced_once(random_program(Seeded(number))) for number in numbers]
    assert sum(folded) > len(folded)  # of two each
