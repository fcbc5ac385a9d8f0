"""Each check of the verifier refuses a program that is broken in one way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar import pipeline
from graphpar.errors import VerifyError
from graphpar.passes.rules import tensor_arguments
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import (
    Program,
    TensorSpec,
    annotate,
    copy_program,
    derive,
    placeholders,
)
from graphpar.testing import assert_equivalent, rewrite
from graphpar.types import I, P, R
from graphpar.verify import CHECKS, Check, shapes, verify
from tests.unit import mutations
from tests.unit.broken_programs import BROKEN, Break
from tests.unit.sound_program import (
    CONVERT,
    SLOW_LINKS,
    Model,
    first,
    local,
    of,
    stages,
)

aten = torch.ops.aten
HERE = "sound_program.py"


def test_all_is_well() -> None:
    for program in stages().values():
        verify(program)
    verify(local())
    assert len(local().blocks) == 1
    assert local().mutations
    assert of(local(), torch.ops.graphpar.dropout.default)
    assert_equivalent(Model(), (torch.randn(2, 4, 8),), tp=2, sp=True, cost=SLOW_LINKS)


def test_every_check_is_broken() -> None:
    broken = {check for check, _, _ in BROKEN}
    assert broken == {check for checks in CHECKS.values() for check in checks}


@pytest.mark.parametrize(
    ("check", "change", "message"),
    BROKEN,
    ids=[f"{check.__name__}-{number}" for number, (check, _, _) in enumerate(BROKEN)],
)
def test_check(check: Check, change: Break, message: str) -> None:
    check(local())
    program = change(local())
    with pytest.raises(VerifyError, match=message):
        check(program)
    with pytest.raises(VerifyError):
        verify(program)


def test_error_names_line_node_and_pass() -> None:
    program = local()
    node = of(program, torch.ops.graphpar.reduce_scatter.default)
    annotate(node, type=P)
    with pytest.raises(VerifyError) as error:
        verify(program)
    line = ": return x + self.down(torch.relu(self.up(self.norm(x))))"
    assert f"\n  at {HERE}:" in str(error.value)
    assert line in str(error.value)
    (note,) = error.value.__notes__
    assert f"%{node.name} " in note
    assert note.endswith("made by insert-collectives")


def test_error_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that forgets a conversion is found at once."""
    run, options = pipeline.PASSES["fuse-biases"]

    def forgetful(program: Program, given: Any) -> Program:
        program = run(program, given)
        mutations.removed(first(program, lambda n: n.target is CONVERT))
        return program

    monkeypatch.setitem(pipeline.PASSES, "fuse-biases", (forgetful, options))
    with pytest.raises(VerifyError, match="Invariant mixes with nothing else") as error:
        run_pipeline(stages()["trace"], default_pipeline(tp=2, sp=True))
    assert error.value.__notes__[-1] == "after step fuse-biases"


def test_a_conversion_before_it_is_due() -> None:
    program = copy_program(stages()["outline"])
    value = placeholders(program.graph)[0]
    with program.graph.inserting_after(value):
        node = derive(
            program.graph,
            CONVERT,
            (value, "tp"),
            like=of(program, aten.relu.default),
            origin="test",
        )
    with pytest.raises(VerifyError, match=f"{node.target} may not stand"):
        verify(program)


def spec(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.device("cpu"), grad)


IDS = spec(2, 4, dtype=torch.int64, grad=False)
ROWS = spec(2, 4, 8)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.linear.default, (ROWS, spec(6, 8), spec(6))),
    (aten.linear.default, (ROWS, spec(6, 7))),
    (aten.add.Tensor, (ROWS, spec(8, dtype=torch.float64, grad=False))),
    (aten.embedding.default, (spec(9, 8), IDS)),
    (aten.scaled_dot_product_attention.default, (spec(2, 3, 4, 8),) * 3),
    (aten.layer_norm.default, (ROWS, [8], spec(8), spec(8))),
    (aten.conv2d.default, (spec(2, 3, 9, 9), spec(4, 3, 3, 3), spec(4), [2, 2])),
    (aten.conv2d.default, (spec(2, 4, 9, 9), spec(4, 3, 3, 3))),
    (aten.cross_entropy_loss.default, (spec(8, 9), spec(8, dtype=torch.int64, grad=False))),
    (aten.to.dtype, (ROWS, torch.bfloat16)),
    (aten.split.Tensor, (ROWS, 3, -1)),
    (aten.argmax.default, (ROWS, 1)),
    (aten.dropout.default, (ROWS, 0.5, True)),
]


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_the_meta_device_knows_what_fake_tensors_do(op: Any, args: tuple[Any, ...]) -> None:
    def run(device: torch.device | None) -> Any:
        try:
            found = shapes._results(op, args, (), device)
        except Exception as error:
            return type(error)
        return [(s.shape, s.dtype, s.differentiable) for s in found if s]

    with FakeTensorMode():
        fake = run(None)
    assert fake == run(torch.device("meta"))


def test_operands_on_two_devices_are_refused() -> None:
    there = replace(IDS, device=torch.device("meta"))
    with pytest.raises(RuntimeError, match=r"(?i)device.* cpu.* meta"):
        shapes._fake_results(aten.add.Tensor, (IDS, there), (), ())
    assert shapes._meta_results(aten.add.Tensor, (IDS, there), (), ()) is None


# --- what was wrong once ------------------------------------------------------------------------


def test_random_ops_are_not_pointwise() -> None:
    """Each rank drew its own slopes for its part."""
    model = nn.Sequential(nn.Linear(8, 16), nn.RReLU(), nn.Linear(16, 8))
    with pytest.warns(match="rrelu.* has no partitioning rule"):
        assert_equivalent(model.double(), (torch.randn(4, 8, dtype=torch.float64),), tp=2)


def test_frozen_parameters_may_be_thawed() -> None:
    """A frozen weight was Replicate: thawed, its gradient was not summed over the ranks."""
    model = Model()
    model.layers[0].norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    program = rewrite(model, (torch.randn(2, 4, 8),), tp=2, sp=True)
    name = "layers.0.norm.weight"
    state = program.state[name]
    assert state.type == I
    program = replace(program, state={**program.state, name: replace(state, type=R)})
    with pytest.raises(VerifyError, match="cannot be Replicate"):
        verify(program)


def test_copies_keep_their_whole_calls() -> None:
    """A copy's calls on whole tensors pointed into the graph that it was copied from."""
    program = local()
    for _, graph in program.graphs():
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert all(operand.graph is graph for operand in tensor_arguments(node))
