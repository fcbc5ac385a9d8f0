"""In-place ops and views: the functional program is bitwise the original, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphpar.errors import TraceError
from graphpar.interpret import model_state, run
from graphpar.program import Program
from graphpar.trace import trace
from tests.unit.functional_models import CASES, REFUSED, Fn, Model, broadcast, siblings, writes_data


def check_functional(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "_schema"):
            assert not node.target._schema.is_mutable, node


def check(fn: Fn, *, exact: bool = True) -> Program:
    """Trace, run, and compare outputs, buffers and gradients with the original."""
    torch.manual_seed(0)
    model, x = Model(fn), torch.randn(4, 6)
    program = trace(model, (x,))
    check_functional(program)

    def gradients(results: list[Any], leaf: Tensor) -> list[Tensor | None]:
        scalars = [(r * r).sum() for r in results if isinstance(r, Tensor) and r.requires_grad]
        if not scalars:
            return []
        return list(
            torch.autograd.grad(sum(scalars[1:], scalars[0]), [model.w, leaf], allow_unused=True)
        )

    # The program first: the original changes the buffers.
    ours = x.clone().requires_grad_()
    torch.manual_seed(1)
    state = {**model_state(model), **{k: v.clone() for k, v in model.named_buffers()}}
    found = run(program, state, [ours])
    found_gradients = gradients(found[: len(found) - len(program.mutations)], ours)
    theirs = x.clone().requires_grad_()
    torch.manual_seed(1)
    expected = pytree.tree_leaves(model(theirs))
    expected_gradients = gradients(expected, theirs)
    buffers = dict(model.named_buffers())
    expected += [buffers[name] for name in program.mutations]
    for a, b in zip(found + found_gradients, expected + expected_gradients, strict=True):
        if b is None or a is None:
            assert all(gradient is None or not gradient.any() for gradient in (a, b))
        elif exact:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    unchanged = set(buffers) - set(program.mutations)
    for name in unchanged:
        assert torch.equal(buffers[name], dict(Model(fn).named_buffers())[name]), name
    return program


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_bitwise(fn: Fn) -> None:
    # The gradient of a view that is written to and read again adds up in another order.
    check(fn, exact=fn not in (siblings, broadcast))


@pytest.mark.parametrize(
    ("fn", "says"),
    REFUSED,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(fn: Fn, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        trace(Model(fn), (torch.randn(4, 6),))
    if fn is not writes_data:  # torch names no line for this one
        assert "functional_models.py:" in caught.value.__notes__[0]
