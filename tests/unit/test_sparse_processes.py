"""Blocks as processes: real parallelism, real memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphpar.codegen.sparse_rnn import processes, stepwise
from graphpar.codegen.sparse_rnn.interleave import DeadlockError
from graphpar.codegen.sparse_rnn.reference import Reference
from graphpar.errors import InputError, KernelError
from tests.unit import interleave_kernels as kernels


def shared(count: int) -> torch.Tensor:
    found = torch.zeros(count, dtype=torch.int32)
    found.share_memory_()
    return found


def test_atomics_lose_nothing() -> None:
    total = shared(1)
    processes.launch(kernels.add_atomically, 3, {"total_ptr": total, "times": 200})
    assert total.item() == 600


def test_a_deadlock_ends() -> None:
    with pytest.raises(DeadlockError, match=r"blocks \[0, 1\] have not ended in 0.3 s"):
        processes.launch(kernels.wait_forever, 2, {"flag_ptr": shared(1)}, seconds=0.3)


def test_a_failure_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KernelError, match="block 1 failed"):
        processes.launch(kernels.block_fails, 2, {"flag_ptr": shared(2)})
    assert "block 1 fails" in capfd.readouterr().err


def test_private_memory_is_refused() -> None:
    total = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="total_ptr is not in shared memory"):
        processes.launch(kernels.add_atomically, 2, {"total_ptr": total, "times": 1})


@pytest.mark.parametrize("sync", ["lamport", "counter"])
def test_a_recurrence(sync: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = 0.3 * torch.randn(3 * 20, 20) * (torch.rand(60, 20) < 0.3)

    def launch(kernel: Any, programs: int, arguments: Any) -> None:
        moved = {
            name: value.share_memory_() if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        processes.launch(kernel, programs, moved, seconds=30)

    reference = Reference(
        weight,
        "gru",
        2,
        launch=launch,
        programs=2,
        threads=128,
        sync=sync,
        spin=False,
        folder=tmp_path,
    )
    x, bias, h = torch.randn(3, 2, 60), torch.randn(60), torch.randn(2, 20)
    for _ in range(2):
        found = reference.forward(x, bias, h, None)[0]
        wanted = stepwise.forward(x, weight, bias, None, h, None, "gru", False, True)[0]
        torch.testing.assert_close(found, wanted)
