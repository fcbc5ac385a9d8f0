"""Helpers of the tests of trace."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpar.interpret import model_state, run
from graphpar.passes.outline import outline
from graphpar.program import Program, info, program_hash
from graphpar.trace import bind, flatten, trace, unflatten
from graphpar.trace.report import TraceReport
from tests.unit.layer_stack import TOKENS, WIDTH


def call(program: Program, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The program's outputs in the model's structure; mutated buffers are written."""
    leaves, _ = flatten(*bind(model, args, kwargs))
    results = run(program, model_state(model), leaves)
    count = len(results) - len(program.mutations)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in zip(program.mutations, results[count:], strict=True):
            buffers[name].copy_(value)
    return unflatten(results[:count], program.out_spec)


def check(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    """Trace and run; outputs, gradients and buffers are bitwise the original's."""
    model.zero_grad(set_to_none=True)
    original = copy.deepcopy(model) if _copyable(model) else model
    program = trace(model, args, kwargs)
    torch.manual_seed(1)
    expected = pytree.tree_leaves(original(*args, **kwargs))
    torch.manual_seed(1)
    found = pytree.tree_leaves(call(program, model, *args, **kwargs))
    for a, b in zip(found, expected, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
    losses = [
        sum(x.double().pow(2).sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad)
        for leaves in (found, expected)
    ]
    if isinstance(losses[1], Tensor):
        for loss in losses:
            assert isinstance(loss, Tensor)
            loss.backward()
    pairs = zip(model.named_parameters(), original.parameters(), strict=True)
    for (name, a), b in pairs:
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), original.buffers(), strict=True):
        assert torch.equal(a, b), name
    return program


def _copyable(model: nn.Module) -> bool:
    return all(
        t.is_leaf for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)
    )


def targets(program: Program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


class Lambda(nn.Module):
    """``fn(self, *args)``, with a linear layer ``a`` and its tied twin ``b``."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, y: Any = None, *, flag: bool = True) -> Any:
        return self.fn(self, x, y, flag)


def x_(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 8))


def assert_same_program(a: Program, b: Program) -> None:
    """Equal in all there is: nodes by name, calls, sources, state, values of constants."""
    assert program_hash(a) == program_hash(b)
    assert [name for name, _ in a.graphs()] == [name for name, _ in b.graphs()]
    for (_, left), (_, right) in zip(a.graphs(), b.graphs(), strict=True):
        for x, y in zip(left.nodes, right.nodes, strict=True):
            assert (x.name, x.op, str(x.target)) == (y.name, y.op, str(y.target))
            assert str((x.args, x.kwargs)) == str((y.args, y.kwargs))
            assert info(x) == info(y)
    assert a.calls == b.calls
    assert a.state == b.state
    assert a.placeholders == b.placeholders
    assert a.mutations == b.mutations
    assert (a.in_spec, a.out_spec) == (b.in_spec, b.out_spec)


def check_once(model: nn.Module, *args: Any) -> TraceReport:
    """Both traces of copies of ``model``, before and after outline, are equal."""
    args = args or (torch.zeros(2, TOKENS, WIDTH),)
    flat = trace(copy.deepcopy(model), args, mode="flat")
    once = trace(copy.deepcopy(model), args)
    assert_same_program(flat, once)
    assert_same_program(outline(flat), outline(once))
    assert not flat.report["trace"].layers
    found = once.report["trace"]
    assert isinstance(found, TraceReport)
    return found


def names(report: TraceReport) -> list[str]:
    """Of the layers that were not traced."""
    return [each.path for each in report.folded]
