"""Collectives of fused ops on gloo processes: when they run, and that gradients are right."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import graphpar
from graphpar import ops
from graphpar.ops import collectives
from graphpar.types import Shard, cut
from tests.distributed.harness import run_processes

WIDTH = 8
GATHER, SCATTER, SUM = "c10d::_allgather_base_", "c10d::alltoall_base_", "c10d::allreduce_"
WAIT = "wait"
CALLS = (GATHER, SCATTER, SUM, WAIT, "aten::mm", "aten::addmm_", "aten::sum")


def traced(run: Callable[[], object]) -> tuple[list[str], set[str]]:
    """What this thread calls of :data:`CALLS`, in order, and what gloo works on beside it."""

    def waited(work: Any, result: Tensor) -> Tensor:
        with record_function(WAIT):
            work.wait()
        return result

    with (
        patch.object(collectives, "_finish", waited),
        profile(activities=[ProfilerActivity.CPU]) as found,
    ):
        run()
    events = sorted(found.events(), key=lambda e: e.time_range.start)
    mine = [e.name for e in events if e.name in CALLS and not e.is_async]
    return mine, {e.name for e in events if e.is_async and e.name.startswith("gloo:")}


def check_order(group: str) -> None:
    """Collectives start before the product beside them, and are waited for after it."""
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(6, 16, requires_grad=True)
    other, bias = torch.randn(6, 16, requires_grad=True), torch.randn(6, requires_grad=True)
    out = ops.gather_linear(x, [weight, other], [], 0, (8,), group)
    calls, works = traced(lambda: sum(y.sum() for y in out).backward())  # type: ignore[union-attr]
    calls = calls[calls.index(GATHER) :]
    of_input = ["aten::mm", "aten::addmm_"]
    of_weights = ["aten::mm", "aten::mm"]
    assert calls == [GATHER, *of_input, SCATTER, WAIT, *of_weights, WAIT, "aten::sum"]
    assert works == {"gloo:all_gather", "gloo:all_to_all"}

    (y,) = ops.convert_linear(x, [weight], [], group)
    calls, works = traced(y.sum().backward)
    assert calls[-4:] == ["aten::mm", SUM, "aten::mm", WAIT]
    assert works == {"gloo:all_reduce"}

    y = ops.linear_scatter(x, weight, bias, 0, (4,), group)
    calls, works = traced(lambda: y.backward(torch.ones(2, 6)))
    assert calls == [GATHER, "aten::sum", WAIT, "aten::mm", "aten::mm"]
    assert works == {"gloo:all_gather"}


class Layer(nn.Module):
    """Norm weights, and biases after reductions: small gradients to be summed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.down(self.up(y).tanh() * self.gate(y))
        return x + y * self.scale  # type: ignore[no-any-return]


def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH)).double(), torch.randn(2, 4, WIDTH)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(found: nn.Module, wanted: nn.Module) -> None:
    for (name, mine), theirs in zip(found.named_parameters(), wanted.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert mine.grad is not None, name
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-10)


def check_small_gradients() -> None:
    """Gradients are there, and right, when backward returns."""
    plain, x = model()
    x = x.double()
    for layer in plain[:2]:  # type: ignore[index]
        layer.norm.bias.requires_grad_(False)
    parallel = graphpar.transform(copy.deepcopy(plain), (x,), tp=2, sp=True)
    both = (parallel, plain)
    for module in both:  # accumulated; the graph kept
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        module(x).sum().backward()
    same(*both)

    calls, _ = traced(lambda: parallel(x).square().sum().backward())
    assert calls.count(SUM) == 2  # one for each layer; the last norm is of whole values

    seen: dict[str, list[Tensor]] = {"": [], "parallel": []}
    for module, key in zip(both, ("parallel", ""), strict=True):
        module.zero_grad()
        weight = module[1].norm.weight  # type: ignore[index]

        def doubled(grad: Tensor, key: str = key) -> Tensor:
            seen[key].append(whole(grad).clone())
            return 2 * grad

        weight.register_hook(doubled)
        module[0].scale.register_post_accumulate_grad_hook(  # type: ignore[index]
            lambda p, key=key: seen[key].append(whole(p.grad).clone())
        )
        module(x).square().sum().backward()
    same(*both)
    torch.testing.assert_close(seen["parallel"], seen[""], rtol=1e-10, atol=1e-10)

    found = []
    for module in both:
        wanted = [module[0].norm.weight, module[1].scale, module[0].up.weight]  # type: ignore[index]
        loss = module(x).square().sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        total = sum(
            (g.to_local() if isinstance(g, DTensor) else g).square().sum() for g in first[:2]
        )
        assert isinstance(total, Tensor)
        found.append([*map(whole, first), whole(torch.autograd.grad(total, wanted[1])[0])])
        module[0].norm.weight.requires_grad_(False)  # type: ignore[index]
        module.zero_grad()
        module(x).square().sum().backward()
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    same(*both)


def four(x: Tensor, weights: list[Tensor], group: str) -> Tensor:
    """Every fused op."""
    w, v, scale, bias = weights
    scale, bias = ops.convert_many([scale, bias], group)
    up, gate = ops.gather_linear(x * scale, [w, v], [None, None], 0, (4,), group)
    down = ops.linear_scatter(up * gate, w.t(), bias, 0, (4,), group)
    (out,) = ops.convert_linear(ops.all_gather(down, 0, (4,), "I", group), [w], [], group)
    return out.sin().sum()


def check_compiled(rank: int, group: str, backends: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    shapes = [(6, WIDTH), (6, WIDTH), (WIDTH,), (WIDTH,)]
    weights = [torch.randn(*shape).requires_grad_() for shape in shapes]
    x = cut(torch.randn(4, WIDTH), Shard(0, (4,)), rank, 2).clone().requires_grad_()
    wanted = torch.autograd.grad(four(x, weights, group), (x, *weights))
    for backend in backends:
        compiled: Any = torch.compile(four, backend=backend, fullgraph=True)
        found = torch.autograd.grad(compiled(x, weights, group), (x, *weights))
        torch.testing.assert_close(found, wanted)


def on_processes(rank: int, group: str, backends: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(rank)
    check_order(group)
    check_small_gradients()
    check_compiled(rank, group, backends)


def test_fused_ops_of_two_processes() -> None:
    run_processes(2, on_processes, ("aot_eager",), timeout=120)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor() -> None:
    run_processes(2, on_processes, ("aot_eager", "inductor"), timeout=300)
