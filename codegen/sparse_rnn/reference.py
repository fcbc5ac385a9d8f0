"""The reference kernels with their weights and their exchange, ready to launch.

Weights lie on chip for a launch; the exchange lives on from launch to launch and is never reset:
each launch counts its epochs from where the last one ended, in the device's memory, so that a CUDA
graph that captured some can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.emit import arguments, emit, load, write
from graphpar.codegen.sparse_rnn.emit_common import sizes
from graphpar.codegen.sparse_rnn.exchange import capturing
from graphpar.codegen.sparse_rnn.operands import (
    RESULTS,
    backward_operands,
    forward_operands,
    row_tables,
)
from graphpar.codegen.sparse_rnn.pack import Packed, pack, repack
from graphpar.codegen.sparse_rnn.spec import KernelSpec, power_of_two
from graphpar.errors import WatchdogError

Launch = Callable[[Any, int, Mapping[str, Any]], None]
"""Runs a kernel with so many blocks at once, on these arguments."""


@dataclass(slots=True)
class Exchange:
    """Words of 64 bits in two buffers, and what counts on from launch to launch: ``clock``, int32,
    holds the epoch that the next launch starts with and the arrivals before it; see
    :class:`graphpar.codegen.sparse_rnn.exchange.Exchange`."""

    words: Tensor
    clock: Tensor
    counter: Tensor
    error: Tensor

    @classmethod
    def of(cls, spec: KernelSpec, device: torch.device) -> Exchange:
        words = torch.zeros(spec.words, dtype=torch.int64, device=device)
        flags = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
        return cls(words, torch.tensor([1, 0], dtype=torch.int32, device=device), *flags)

    def start(self, payload: Tensor) -> None:
        """Write the words of the first epoch, int32 of a buffer's size."""
        word = payload.reshape(-1).to(torch.int64) & 0xFFFFFFFF
        self.words[: len(word)] = word | (self.clock[0].to(torch.int64) << 32)

    def advance(self, steps: int, programs: int) -> None:
        """After a launch: its epochs and arrivals are used up."""
        self.clock[0] += steps + 1
        self.clock[1] += steps * programs


def payload_of(state: Tensor, spec: KernelSpec) -> Tensor:
    """What the words of a state [B, N] hold: int32 [W, N]."""
    if spec.state == "fp32":
        return state.float().contiguous().view(torch.int32)
    halves = F.pad(state, (0, 0, 0, len(state) % 2)).bfloat16().view(torch.int16).int()
    return (halves[::2] & 0xFFFF) | (halves[1::2] << 16)


class Resident:
    """A packed matrix in the form that the kernel of ``spec`` loads."""

    def __init__(
        self, weight: Tensor, spec_of: Callable[..., KernelSpec], gates: int, **sizes: Any
    ) -> None:
        self.packed: Packed = pack(weight, gates=gates, **sizes)
        layout = self.packed.layout
        rows, slots = power_of_two(layout.units.shape[1]), power_of_two(layout.slots.shape[2])
        depth = power_of_two(layout.depth)
        self.spec = spec_of(depth=depth, rows=rows, slots=slots)
        device = weight.device
        tables = row_tables(layout, gates, rows, slots)
        self.slots, self.units = (table.to(device) for table in tables)
        self._deeper = (0, 0, 0, depth - layout.depth)
        self.columns = F.pad(self.packed.columns, self._deeper).contiguous().to(device)
        self.values = self._values().to(device)

    def _values(self) -> Tensor:
        return F.pad(self.packed.values.float(), self._deeper).contiguous()

    def update(self, weight: Tensor) -> bool:
        """Take the values of ``weight``; ``False``, and nothing is done, if its pattern grew."""
        if not repack(self.packed, weight.detach().cpu()):
            return False
        self.values.copy_(self._values())
        return True

    def arguments(self) -> dict[str, Tensor]:
        return {
            "value_ptr": self.values,
            "column_ptr": self.columns,
            "slot_ptr": self.slots,
            "unit_ptr": self.units,
        }


class Reference:
    """One layer and direction by the reference kernels.

    Args:
        weight: [G * H, H].
        launch: see :data:`Launch`.
        programs, threads: blocks, and slots of each, a power of two.
        state, sync: see :class:`KernelSpec`.
        value_type: of the weights.
        folder: for the generated files.
        edit: changes the text of a kernel; for tests.
    """

    def __init__(
        self,
        weight: Tensor,
        cell: str,
        batch: int,
        *,
        launch: Launch,
        programs: int,
        threads: int,
        state: str = "fp32",
        sync: str = "lamport",
        reverse: bool = False,
        value_type: torch.dtype = torch.float32,
        spin: bool = True,
        folder: Path | None = None,
        edit: Callable[[str], str] = lambda text: text,
    ) -> None:
        self.cell, self._launch, self._spin = cell_of(cell), launch, spin
        self._folder, self._edit = folder, edit
        gates, hidden = self.cell.gates, weight.shape[1]
        programs = min(programs, hidden)
        sizes = {"programs": programs, "threads": threads, "value_type": value_type}
        common = {"cell_name": cell, "hidden": hidden, "batch": batch, "programs": programs}
        common |= {"threads": threads, "state": state, "sync": sync, "reverse": reverse}

        def spec_of(part: str) -> Callable[..., KernelSpec]:
            return lambda **given: KernelSpec(part=part, **common, **given)  # type: ignore[arg-type]

        self._forward = Resident(weight, spec_of("forward"), gates, **sizes)
        self._backward = Resident(weight.t().contiguous(), spec_of("backward"), 1, **sizes)
        parts = (self._forward, self._backward)
        self.exchanges = tuple(Exchange.of(part.spec, weight.device) for part in parts)
        self._kernels: dict[str, Any] = {}

    def update(self, weight: Tensor) -> bool:
        """Take new values; ``False`` if the pattern grew."""
        return self._forward.update(weight) and self._backward.update(weight.t().contiguous())

    def forward(
        self, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states [T, B, H], the last cell state [B, H] and saved values [T, S, H, B], of
        float32 operands: gates [T, B, G * H], the recurrent bias [G * H], states [B, H]."""
        spec, first = self._forward.spec, payload_of(h, self._forward.spec)
        if spec.state == "bf16":
            h = h.bfloat16().float()
        given = forward_operands(self.cell, gates, bias, h, c, save=spec.save)
        self._run(self._forward, self.exchanges[0], first, len(gates), given)
        out, c_out, saved = (given[name] for name in RESULTS["forward"])
        return out, c_out, saved

    def backward(
        self,
        dout: Tensor,
        dc: Tensor | None,
        out: Tensor,
        saved: Tensor,
        h: Tensor,
        c: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of: the gates' input part and recurrent part [T, B, G * H], the first state
        and the first cell state [B, H]."""
        spec = self._backward.spec
        first = payload_of(h.new_zeros(spec.batch, spec.exchanged), spec)
        given = backward_operands(self.cell, dout, dc, out, saved, h, c)
        self._run(self._backward, self.exchanges[1], first, len(out), given)
        dgates, drecurrent, dh, dc_out = (given[name] for name in RESULTS["backward"])
        return dgates, drecurrent, dh, dc_out

    def _run(
        self,
        part: Resident,
        exchange: Exchange,
        first: Tensor,
        steps: int,
        operands: Mapping[str, Tensor],
    ) -> None:
        """Launch, with ``first`` as the payload that the first step receives."""
        spec = part.spec
        exchange.start(first)
        given: dict[str, Any] = {"steps": steps, **operands}
        if spec.part not in self._kernels:
            module = load(write(self._edit(emit(spec)), self._folder))
            self._kernels[spec.part] = getattr(module, spec.part)
        given |= part.arguments()
        given["exchange_ptr"], given["clock_ptr"] = exchange.words, exchange.clock
        given["counter_ptr"], given["error_ptr"] = exchange.counter, exchange.error
        ordered = {name: given[name] for name in arguments(spec)}
        constants = {**sizes(spec), "SPIN": self._spin}
        self._launch(self._kernels[spec.part], spec.programs, {**ordered, **constants})
        exchange.advance(steps, spec.programs)
        if not capturing(first.device) and int(exchange.error):
            exchange.error.zero_()
            raise WatchdogError("a block waited in vain for another one and gave up")
