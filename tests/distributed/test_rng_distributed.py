"""Masks of dropout on real processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

import graphpar
from tests.distributed.harness import run_processes
from tests.golden.models import dropping_layers


def check_rng(rank: int, group: str) -> list[float]:
    """Losses of two steps with "invariant", then with "per-rank"; gradients of the former."""
    torch.manual_seed(0)
    model, x = dropping_layers()
    model, x = model.double(), x.double()
    alone = graphpar.transform(model, (x,), tp=1)
    found: list[float] = []
    for rng in ("invariant", "per-rank"):
        parallel = graphpar.transform(model, (x,), tp=2, sp=True, rng=rng)
        torch.manual_seed(1)
        for _ in range(2):
            parallel.zero_grad()
            loss = parallel(x).square().sum()
            loss.backward()
            found.append(loss.item())
        if rng == "invariant":
            torch.manual_seed(1)
            for _ in range(2):
                alone.zero_grad()
                expected = alone(x).square().sum()
                expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
            for name, p in parallel.named_parameters():
                wanted = alone.get_parameter(name).grad
                assert p.grad is not None
                grad = p.grad.full_tensor()  # type: ignore[attr-defined]
                torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)
    dist.barrier()
    return found


def test_two_processes() -> None:
    first, second = run_processes(2, "tests.distributed.test_rng_distributed:check_rng")
    assert first == second
    assert len(set(first)) == 4
