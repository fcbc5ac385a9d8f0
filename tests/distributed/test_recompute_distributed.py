"""Recomputation on real processes: collectives run again in backward, plans agreed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphpar
from graphpar import ops
from graphpar.cost.kernels import KernelRecorder
from graphpar.errors import RankMismatchError
from graphpar.memory import LiveBytes, step_memory
from graphpar.parallel_module import ParallelModule
from tests import zoo
from tests.distributed.harness import run_processes


def check_recompute(rank: int, group: str) -> list[int]:
    """Gradients are those without recomputation, bit by bit; the bytes kept by each mode."""
    sizes = []
    for rng in ("exact",):
        expected: list[torch.Tensor] = []
        model, kwargs = zoo.build("nanogpt", layers=1)
        for mode in ("none", "full"):
            parallel = graphpar.transform(model, (), kwargs, tp=2, sp=True, rng=rng, recompute=mode)
            torch.manual_seed(1)
            with graphpar.cost.SavedTensors(parallel.local_tensors().values()) as saved:
                loss = zoo.loss_of(parallel(**kwargs))
                sizes.append(saved.nbytes)
            loss.backward()
            check_peak(parallel, kwargs)
            found = [p.grad.full_tensor() for p in parallel.parameters()]  # type: ignore[union-attr]
            if expected:
                assert all(map(torch.equal, found, expected))
            expected = found
    dist.barrier()
    return sizes


def check_peak(parallel: ParallelModule, kwargs: dict[str, Any]) -> None:
    """The most bytes that a step takes at once are those predicted, up to the buffer that a
    reduce-scatter over gloo (an all-to-all and a sum) takes beside."""
    predicted = step_memory(parallel.program)
    given = [x for x in kwargs.values() if isinstance(x, torch.Tensor)]
    state = [*parallel.local_tensors().values(), *parallel.program.constants.values()]
    peaks = []
    for _ in range(3):  # a thread of gloo's may hold a tensor for a moment longer
        for p in parallel.parameters():  # as before the first step
            p.grad = None
        live = LiveBytes([*state, *given])
        assert live.now == predicted.state_bytes + predicted.input_bytes
        with live:
            outputs = parallel(**kwargs)
            zoo.loss_of(outputs).backward()
        peaks.append(live.peak)
    buffer_bytes = 2 * 16 * 64 * 8  # batch, sequence, width
    loss_bytes = 8  # backward of a prediction starts from a sum of losses
    assert -loss_bytes <= min(peaks) - predicted.peak_bytes <= buffer_bytes


def check_held(rank: int, group: str) -> None:
    """A fused product held inside a region: its gather does not run in the second run."""
    torch.manual_seed(2)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def gather(y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops.gather_linear(y, [weight], [], 0, [8], group)[0]
        return found

    def region(made: Any, hold: Any, x: torch.Tensor) -> tuple[list[Any], list[Any]]:
        whole = hold(gather, made(0, torch.exp, x))
        return [torch.square(made(1, torch.sin, whole))], [whole]

    def again(made: Any, x: torch.Tensor, whole: torch.Tensor) -> None:
        made(0, torch.exp, x)
        made(1, torch.sin, whole)

    found, counts = [], []
    for recompute in (False, True):
        with KernelRecorder() as recorder:
            if recompute:
                (out,) = ops.recompute(region, again, [x], holds=True)
            else:
                out = gather(x.exp()).sin().square()
            found.append(torch.autograd.grad(out.sum(), [x, weight]))
        counts.append(sum(bool(kernel.collective) for kernel in recorder.kernels))
    assert all(map(torch.equal, *found))
    assert counts[0] == counts[1] == 3
    dist.barrier()


def check_agreement(rank: int, group: str) -> str:
    """Ranks that were given different modes: an error on both, no hang."""
    model, kwargs = zoo.build("nanogpt", layers=1)
    with pytest.raises(RankMismatchError) as error:
        graphpar.transform(model, (), kwargs, tp=2, recompute=("full", "none")[rank])
    dist.barrier()
    return str(error.value)


def check_all(rank: int, group: str) -> tuple[list[int], str]:
    check_held(rank, group)
    return check_recompute(rank, group), check_agreement(rank, group)


def test_two_processes() -> None:
    """C55 among it."""
    (sizes, first), (same, second) = run_processes(
        2, "tests.distributed.test_recompute_distributed:check_all"
    )
    assert sizes == same
    for none, full in zip(sizes[::2], sizes[1::2], strict=True):
        assert full < 0.6 * none
    assert first == second
    assert "ranks differ in program" in first
