"""Programs with one conversion changed: the verifier refuses each that is not the same."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
from torch import fx

from graphpar.axes import OpAxes
from graphpar.cost import CostModel
from graphpar.errors import InternalError, VerifyError
from graphpar.passes import rules
from graphpar.passes.rules import tensor_arguments
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, info, tensor_spec
from graphpar.testing import compare
from graphpar.trace import bind, trace
from graphpar.types import I, R, Shard, Type
from graphpar.verify import verify
from tests import zoo
from tests.unit import fused_mutants, mutants, mutations
from tests.unit.mutations import Mutant

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.errors.GraphparWarning")

CASES = [("gpt2", False), ("llama", True), ("odd", True)]
REST = [(m, sp) for m in sorted({*zoo.BUILDERS, *zoo.MORE}) for sp in (False, True)]
IDS = [f"{model}-{'sp' if sp else 'tp'}" for model, sp in CASES]

# Mutants that are accepted, and rightly: the simulated ranks agree with the model.
EQUIVALENT = {
    "moved up, re-derived": "converting before a view is converting after it",
    "moved down, re-derived": "converting after a view is converting before it",
    "mistyped, re-derived": "another layout, which all users can take",
    "state": "a buffer that nothing reads may be called Replicate",
    "state, re-derived": "a buffer that nothing reads may be called Replicate",
}


@functools.cache
def traced(model: str) -> tuple[Program, Any, Any]:
    module, kwargs = zoo.build(model, dropout=0.0)
    return trace(module, *bind(module, (), kwargs)), module, kwargs


@functools.cache
def rewritten(model: str, sp: bool, *, overlap: bool = False) -> Program:
    program, _, _ = traced(model)
    pipeline = default_pipeline(tp=2, sp=sp, rng="exact", overlap=overlap)
    return list(run_pipeline(program, pipeline).values())[-1]


@pytest.fixture(autouse=True)
def _remembered_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most ops of a mutant are those of the program: apply a rule once to equal calls."""
    known: dict[Any, OpAxes] = {}

    def op_axes(node: fx.Node) -> OpAxes:
        call = info(node).whole_call or (node.args, node.kwargs)
        specs = tuple(tensor_spec(n) for n in tensor_arguments(node))
        key = node.target, str(call), specs, info(node).spec
        if key not in known:
            known[key] = rules.op_axes(node)
        return known[key]

    monkeypatch.setattr("graphpar.verify.derive.op_axes", op_axes)


def difference(program: Program, model: str) -> str:
    """What a simulation of all ranks says against the program; empty if it equals the model."""
    _, module, kwargs = traced(model)
    try:
        compare(program, module, (), kwargs)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def score(model: str, sp: bool) -> tuple[Counter[str], Counter[str]]:
    """How many mutants of each kind there are, and how many are refused; the rest are equal."""
    program = rewritten(model, sp)
    found = judged(
        model,
        chain(
            mutants.mutants_of_conversions(program),
            mutants.mutants_of_state(program),
            mutants.mutants_of_inputs(program),
            mutants.mutants_of_arguments(program),
            mutants.mutants_of_biases(program),
            mutants.mutants_of_forms(program),
        ),
    )
    assert found[0]["removed"] == len(mutations.conversions(program))
    return found


def judged(model: str, candidates: Iterable[Mutant]) -> tuple[Counter[str], Counter[str]]:
    made: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for mutant in candidates:
        made[mutant.kind] += 1
        try:
            verify(mutant.program)
        except InternalError:
            refused[mutant.kind] += 1
        else:
            found = difference(mutant.program, model)
            assert not found, f"accepted: {mutant.kind} {mutant.what}: {found}"
            assert mutant.kind in EQUIVALENT, f"accepted: {mutant.kind} {mutant.what}"
    print(
        f"\n{model}: {refused.total()} of {made.total()} mutants refused, "
        f"{(made - refused).total()} equal: {made - refused}"
    )
    return made, refused


@pytest.mark.parametrize(("model", "sp"), CASES[:2], ids=IDS[:2])
def test_mutants_of_fused_ops_are_refused(
    model: str, sp: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    program = rewritten(model, sp, overlap=True)
    verify(program)
    assert not difference(program, model)
    with capsys.disabled():
        made, refused = judged(model, fused_mutants.mutants_of_fused_ops(program))
    assert made == refused
    assert made["removed"] >= 3


@pytest.mark.parametrize(("model", "sp"), CASES, ids=IDS)
def test_every_mutant_is_refused_or_equal(
    model: str, sp: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        made, refused = score(model, sp)
    assert made["no reduction"] == refused["no reduction"] >= 1
    assert made["removed"] > 5


@pytest.mark.long
@pytest.mark.parametrize(("model", "sp"), [case for case in REST if case not in CASES])
def test_mutants_of_the_zoo(model: str, sp: bool) -> None:
    score(model, sp)


def same_forward(source: Type, target: Type) -> tuple[Type, Type] | None:
    """Types with the same forward and another backward, if there are."""
    other: dict[Type, Type] = {I: R, R: I}
    if source in other:
        return (other[source], target) if isinstance(target, Shard) else None
    return (source, other[target]) if target in other else None


def wrong_gradients(program: Program) -> Iterator[Mutant]:
    """Conversions of differentiable values that are wrong in backward only."""
    for place in mutations.conversions(program):
        node = mutations.find(program, place)
        if not tensor_spec(node).differentiable:
            continue
        source, target = mutations.types_of(node)
        if (source, target) == (I, R):
            changed = mutations.changed(program, place, mutations.removed)
            yield Mutant("removed", str(place), changed)
        elif (pair := same_forward(source, target)) is not None:
            yield mutations.mistyped(program, place, *pair)


@pytest.mark.parametrize(("model", "sp"), CASES, ids=IDS)
def test_simulation_sees_wrong_gradients(model: str, sp: bool) -> None:
    mutants = list(wrong_gradients(rewritten(model, sp)))
    assert len(mutants) >= 4
    for mutant in mutants:
        with pytest.raises(VerifyError):
            verify(mutant.program)
        assert difference(mutant.program, model).startswith("gradient of"), mutant.what


@pytest.mark.parametrize(("model", "sp"), CASES, ids=IDS)
def test_simulation_sees_removed_conversions(model: str, sp: bool) -> None:
    program = rewritten(model, sp)
    for place in mutations.conversions(program):
        assert difference(mutations.changed(program, place, mutations.removed), model), place


class RandomCost(CostModel):
    """Prices by lot, so that the planner types values in ways that nobody would choose."""

    def op_us(self, flops: int, nbytes: int) -> float:
        return random.random()

    def conversion_us(self, *args: Any, **kwargs: Any) -> float:
        return random.random()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_any_typing_that_is_accepted_is_equal(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphpar.passes.annotate.model.MUST_SHARD_SHARE", 2.0)
    random.seed(seed)
    pipeline = default_pipeline(tp=(2, 4)[seed % 2], sp=True, cost=RandomCost())
    program = list(run_pipeline(traced(model)[0], pipeline).values())[-1]
    assert not difference(program, model)
