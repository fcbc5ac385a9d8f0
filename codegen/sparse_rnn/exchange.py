"""What the blocks of a fast kernel share, from launch to launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.codegen.sparse_rnn.emit_fast_shared import MISPLACED
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import Value
from graphpar.errors import KernelError, WatchdogError

TYPES: Mapping[Value, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def capturing(device: torch.device) -> bool:
    """Whether the launches of now go into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class Exchange:
    """What the blocks of one kernel share.

    ``clock``: int32, the epoch that the next launch starts with and the arrivals before it. Both
    may wrap around: a launch overwrites all words, so that none keeps an epoch for so long.
    """

    def __init__(self, spec: FastSpec, device: torch.device) -> None:
        self.spec = spec
        self.words = torch.zeros(spec.words, dtype=torch.int64, device=device)
        self.clock = torch.tensor([1, 0], dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)

    def arguments(self) -> dict[str, Tensor]:
        return {
            "exchange_ptr": self.words,
            "clock_ptr": self.clock,
            "counter_ptr": self.counter,
            "error_ptr": self.error,
        }

    def start(self, first: Tensor) -> None:
        """Write what the first step receives, of ``first`` [B, N]."""
        spec = self.spec
        padded = F.pad(first, (0, 0, 0, spec.passes * spec.columns - spec.batch))
        if spec.value == "fp32":
            payloads = padded.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        else:
            halves = padded.to(TYPES[spec.value]).view(torch.int16).to(torch.int64) & 0xFFFF
            payloads = halves[::2] | (halves[1::2] << 16)
        each = payloads.unflatten(0, (spec.passes, spec.payloads))  # passes, payloads, N
        if spec.sync == "counter":
            words = each[:, 0] | (each[:, -1] << 32)
        else:
            words = each.transpose(1, 2) | (self.clock[0].to(torch.int64) << 32)
        flat = words.reshape(-1)
        self.words[: len(flat)] = flat

    def advance(self, steps: int) -> None:
        """After a launch: its epochs and arrivals are used up."""
        self.clock[0] += steps + 1
        self.clock[1] += steps * self.spec.programs

    def ask(self) -> None:
        """After a launch: let the device tell whether a block gave up. On a GPU the answer comes
        later, and a launch that is captured gives none."""
        if not self.error.is_cuda:
            self.check()
        elif not capturing(self.error.device):
            self._told.copy_(self.error, non_blocking=True)

    def told(self) -> None:
        """Raise what :meth:`check` raises if an earlier launch has told so; does not wait for the
        device."""
        if int(self._told):
            self._fail(int(self._told))

    def check(self) -> None:
        """Whether a block failed; waits for the device.

        Raises:
            WatchdogError: a block gave up. KernelError: its shared memory lies elsewhere than the
                text of the kernel takes for granted.
        """
        if int(self.error):
            self._fail(int(self.error))

    def _fail(self, told: int) -> None:
        self._told.zero_()
        self.error.zero_()
        if told == MISPLACED:
            raise KernelError(
                "this version of triton puts shared memory elsewhere than the kernel expects: "
                "results of this recurrence were NaN since; triton 3.7 or newer does without"
            )
        raise WatchdogError(
            "a block waited in vain for another one and gave up: results of this recurrence were "
            "NaN since"
        )
