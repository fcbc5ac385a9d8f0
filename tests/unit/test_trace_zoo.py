"""The traced program, run on one device, is bitwise the eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpar.interpret import model_state, run
from graphpar.passes.outline import outline
from graphpar.program import Program
from graphpar.trace import bind, flatten, skeleton, trace, unflatten
from tests import zoo
from tests.unit.trace_checks import assert_same_program


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def run_program(program: Program, model: nn.Module, kwargs: dict[str, Any]) -> Any:
    leaves, _ = flatten(*bind(model, (), kwargs))
    results = run(program, model_state(model), leaves)
    count = len(results) - len(program.mutations)
    return unflatten(results[:count], program.out_spec)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    left, left_spec = pytree.tree_flatten(a)
    right, right_spec = pytree.tree_flatten(b)
    assert left_spec == right_spec
    for x, y in zip(left, right, strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x, y)
            assert x.dtype == y.dtype
        else:
            assert x == y


def _never(*args: Any) -> bool:
    return False


@pytest.mark.parametrize("name", zoo.BUILDERS)
def test_bitwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers repeats grouped keys when it is traced, and lets SDPA do so when it is not;
    # where SDPA does, the CPU's flash kernel adds up the heads' gradients in another order.
    monkeypatch.setattr("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", _never)
    model, kwargs = zoo.build(name)
    hollow = skeleton(model)
    assert sum(p.untyped_storage().nbytes() for p in hollow.parameters()) == 0
    for mode in (True, False):
        program = trace(model.train(mode), (), kwargs)
        if mode:
            flat = trace(hollow.train(), (), kwargs, mode="flat")
            assert_same_program(flat, program)
            assert_same_program(outline(flat), outline(program))
        torch.manual_seed(1)
        expected = model(**kwargs)
        zoo.loss_of(expected).backward()
        expected_gradients = gradients(model)
        torch.manual_seed(1)
        found = run_program(program, model, kwargs)
        assert_same(found, expected)
        zoo.loss_of(found).backward()
        for parameter, gradient in gradients(model).items():
            want = expected_gradients[parameter]
            assert (gradient is None) == (want is None), parameter
            assert gradient is None or want is None or torch.equal(gradient, want), parameter
