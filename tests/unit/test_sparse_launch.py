"""Launches of the fast kernels on GPUs, as far as that can be said without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import FastLauncher, described
from graphpar.errors import UnsupportedError

SIZES: dict[str, Any] = {"batch": 1, "device": DEVICES["sm_90"], "value": "bf16"}


def test_what_the_compiler_or_the_driver_says_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the recurrence goes to the library's products; a kernel is made once per device."""
    launcher = FastLauncher()
    spec = FastSpec.of(plan_of(torch.eye(16), "rnn_tanh", "forward", **SIZES))
    made: list[torch.device] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda **arguments: made.append(arguments["exchange_ptr"].device)

    def ready(self: FastLauncher, spec: FastSpec, programs: int, arguments: Any) -> Any:
        if arguments["steps"] < 0:
            raise RuntimeError("too many resources requested for launch")
        made.append(torch.device("meta"))
        return Kernel()

    monkeypatch.setattr(FastLauncher, "_ready", ready)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    given = {
        n: {"exchange_ptr": SimpleNamespace(device=torch.device("cuda", n)), "steps": 1}
        for n in (0, 1)
    }
    with pytest.raises(UnsupportedError, match="refuses the kernel: too many resources requested"):
        launcher(spec, 4, {**given[0], "steps": -1})
    for n in (0, 1, 0):
        launcher(spec, 4, given[n])
    assert [d.type for d in made] == ["meta", "cuda", "meta", "cuda", "cuda"]


def test_a_gpu_is_planned_as_the_known_one_that_is_nearest() -> None:
    sizes = {"multi_processor_count": 142, "regs_per_multiprocessor": 65536}
    sizes |= {"shared_memory_per_block_optin": 101376}
    found = described(SimpleNamespace(name="L40S", major=8, minor=9, **sizes))
    assert (found.name, found.arch) == ("L40S", "sm_80")
    assert (found.multiprocessors, found.shared_bytes) == (142, 101376)
    newer = described(SimpleNamespace(name="later", major=12, minor=0, **sizes))
    assert newer.arch == "sm_100"
