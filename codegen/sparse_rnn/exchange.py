"""What the blocks of a fast kernel share, from launch to launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import Value
from graphpar.errors import KernelError

TYPES: Mapping[Value, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


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

    def check(self) -> None:
        """Raise :class:`KernelError` if a block gave up; waits for the device."""
        if int(self.error):
            self.error.zero_()
            raise KernelError("a block waited in vain for another one and gave up")
