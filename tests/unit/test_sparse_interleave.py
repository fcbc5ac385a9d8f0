"""The executor that runs a launch's blocks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphpar.codegen.sparse_rnn.interleave import DeadlockError, Schedule, interpreting, launch
from tests.unit import interleave_kernels as kernels

PROGRAMS = 4


def integers(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize("weak", [False, True])
def test_atomics_lose_nothing(weak: bool) -> None:
    total = integers(1)
    arguments = {"total_ptr": total, "times": 20}
    launch(kernels.add_atomically, PROGRAMS, arguments, Schedule(weak=weak))
    assert total.item() == 20 * PROGRAMS


def test_blocks_run_together() -> None:
    """Load and store are two accesses: increments get lost, as one after another they would not."""
    total = integers(1)
    launch(kernels.add_plainly, PROGRAMS, {"total_ptr": total, "times": 20})
    assert 20 <= total.item() < 20 * PROGRAMS


def test_a_seed_repeats_a_run() -> None:
    def totals(seed: int) -> int:
        total = integers(1)
        launch(
            kernels.add_plainly, PROGRAMS, {"total_ptr": total, "times": 20}, Schedule(seed=seed)
        )
        return int(total)

    assert [totals(seed) for seed in range(4)] == [totals(seed) for seed in range(4)]
    assert len({totals(seed) for seed in range(4)}) > 1


def message(send: str, receive: str, *, weak: bool = True) -> set[str]:
    """Whether messages arrive, over twenty schedules."""
    found = set()
    for seed in range(20):
        data, flag, got = integers(4), integers(1), integers(4)
        arguments: Mapping[str, Any] = {
            "data_ptr": data, "flag_ptr": flag, "got_ptr": got, "SEND": send, "RECEIVE": receive,
        }  # fmt: skip
        launch(kernels.pass_message, 2, arguments, Schedule(seed=seed, weak=weak))
        found.add("whole" if got.tolist() == [5, 6, 7, 8] else "broken")
    return found


def test_release_and_acquire_pass_a_message() -> None:
    assert message("release", "acquire") == {"whole"}


@pytest.mark.parametrize(("send", "receive"), [("relaxed", "acquire"), ("release", "relaxed")])
def test_a_relaxed_side_loses_it(send: str, receive: str) -> None:
    assert "broken" in message(send, receive)
    assert message(send, receive, weak=False) == {"whole"}


@pytest.mark.parametrize("weak", [False, True])
def test_a_deadlock_is_seen(weak: bool) -> None:
    with pytest.raises(DeadlockError, match=r"blocks \[0, 1, 2, 3\] only read"):
        launch(
            kernels.wait_forever,
            PROGRAMS,
            {"flag_ptr": integers(1)},
            Schedule(patience=9, weak=weak),
        )


def test_what_a_block_raises_is_raised() -> None:
    flags = integers(PROGRAMS)
    with pytest.raises(Exception, match="block 1 fails"):
        launch(kernels.block_fails, PROGRAMS, {"flag_ptr": flags})
    # and the interpreter is as it was
    total = integers(1)
    kernels.add_atomically[(3,)](total, times=2)
    assert total.item() == 6


def test_only_the_shared_tensors_are_weak() -> None:
    data, flag, got = integers(4), integers(1), integers(4)
    for seed in range(10):
        schedule = Schedule(seed=seed, weak=True, shared=[got])
        arguments: Mapping[str, Any] = {
            "data_ptr": data, "flag_ptr": flag, "got_ptr": got,
            "SEND": "relaxed", "RECEIVE": "relaxed",
        }  # fmt: skip
        launch(kernels.pass_message, 2, arguments, schedule)
        assert got.tolist() == [5, 6, 7, 8]
        for tensor in (data, flag, got):
            tensor.zero_()


def test_triton_interprets_here() -> None:
    assert interpreting()
