"""Recomputation on real processes: collectives run again in backward, plans agreed on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import graphpar
from graphpar.errors import RankMismatchError
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
            found = [p.grad.full_tensor() for p in parallel.parameters()]  # type: ignore[union-attr]
            if expected:
                assert all(map(torch.equal, found, expected))
            expected = found
    dist.barrier()
    return sizes


def check_agreement(rank: int, group: str) -> str:
    """Ranks that were given different modes: an error on both, no hang."""
    model, kwargs = zoo.build("nanogpt", layers=1)
    with pytest.raises(RankMismatchError) as error:
        graphpar.transform(model, (), kwargs, tp=2, recompute=("full", "none")[rank])
    dist.barrier()
    return str(error.value)


def check_all(rank: int, group: str) -> tuple[list[int], str]:
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
