"""Exports of several threads, and what other threads do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

from graphpar.program import Program
from graphpar.trace import trace
from tests.unit.layer_stack import TOKENS, WIDTH, Layer, Stack
from tests.unit.layers_in_modes import Attention, NoGrad
from tests.unit.trace_checks import assert_same_program


def traced(kind: Callable[[int], nn.Module]) -> Program:
    return trace(Stack(kind), (torch.zeros(2, TOKENS, WIDTH),))


def patched_places() -> list[Any]:
    return [
        proxy_tensor._ModuleStackTracer.call_module,
        proxy_tensor._ModuleStackTracer.create_node,
        proxy_tensor.ProxyTorchDispatchMode.__torch_dispatch__,
        torch.fx.GraphModule.recompile,
        torch.autograd.Function.apply.__func__.__code__,  # type: ignore[attr-defined]
        nn.Module.__setattr__,
        torch.Tensor.backward,
        torch.manual_seed,
    ]


def test_two_threads_trace_at_once() -> None:
    kinds = [Layer, Attention, NoGrad, Layer]
    before = patched_places()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(traced, kinds))
    assert patched_places() == before
    for kind, program in zip(kinds, found, strict=True):
        assert_same_program(program, traced(kind))
        assert len(program.report["trace"].folded) == 3


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_another_thread_trains_while_a_model_is_traced() -> None:
    done = []

    def train() -> None:
        torch.manual_seed(0)
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: grad + 1)
        loss = Twice.apply(x).sum()  # type: ignore[no-untyped-call]
        loss.backward()
        module = nn.Linear(2, 2)
        for number in range(2):
            setattr(module, "flag", number)  # noqa: B010 - it has no such attribute to mypy
        code = torch.fx.symbolic_trace(module).code
        assert x.grad is not None
        done.append((x.grad, code))

    class Meanwhile(Layer):
        def change(self, x: Tensor) -> Any:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            return x

    with torch.random.fork_rng():
        program = traced(Meanwhile)
    assert_same_program(program, trace(Stack(), (torch.zeros(2, TOKENS, WIDTH),)))
    assert len(done) == 4
    for grad, code in done:
        assert torch.equal(grad, torch.full((3,), 3.0))
        assert "linear" in code
