"""The reference kernels with their weights and their exchange, ready to launch.

Weights lie on chip for a launch; the exchange lives on from launch to launch and is never reset:
each launch counts its epochs from where the last one ended.
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
from graphpar.codegen.sparse_rnn.pack import Packed, pack, repack
from graphpar.codegen.sparse_rnn.spec import KernelSpec, power_of_two
from graphpar.errors import KernelError

Launch = Callable[[Any, int, Mapping[str, Any]], None]
"""Runs a kernel with so many blocks at once, on these arguments."""

MAX_EPOCH = (1 << 31) - 2


@dataclass(slots=True)
class Exchange:
    """Words of 64 bits in two buffers; ``epoch`` is the first that no word carries yet."""

    words: Tensor
    counter: Tensor
    error: Tensor
    epoch: int = 1

    @classmethod
    def of(cls, spec: KernelSpec, device: torch.device) -> Exchange:
        words = torch.zeros(spec.words, dtype=torch.int64, device=device)
        flags = torch.zeros(2, dtype=torch.int32, device=device)
        return cls(words, flags[:1], flags[1:])

    def start(self, payload: Tensor, steps: int) -> tuple[int, int]:
        """Write the words of the first epoch, int32 of a buffer's size; returns the epoch and the
        arrivals that the counter has seen. Epochs for ``steps`` steps are used up."""
        if self.epoch + steps >= MAX_EPOCH:
            self.words.zero_()
            self.epoch = 1
        epoch = self.epoch
        word = (payload.reshape(-1).to(torch.int64) & 0xFFFFFFFF) | (epoch << 32)
        self.words[: len(word)] = word
        self.epoch = epoch + steps + 1
        return epoch, int(self.counter)


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
        table = torch.from_numpy(layout.slots).unflatten(1, (gates, -1))
        more = (0, slots - table.shape[3], 0, rows - table.shape[2])
        self.slots = F.pad(table, more, value=layout.threads - 1).contiguous().to(device)
        units = torch.from_numpy(layout.units)
        self.units = F.pad(units, (0, rows - units.shape[1]), value=-1).contiguous().to(device)
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
        spec, exchange = self._forward.spec, self.exchanges[0]
        steps, batch, _ = gates.shape
        own = h.new_zeros(spec.hidden)
        if bias is not None:
            added, own = bias, bias[-spec.hidden :]
            if self.cell.splits:
                added = torch.cat((bias[: -spec.hidden], torch.zeros_like(own)))
            gates = gates + added
        out = h.new_empty(steps, batch, spec.hidden)
        c_out = torch.empty_like(h)
        saved = h.new_empty(steps, self.cell.saved, spec.hidden, batch)
        epoch, arrived = exchange.start(payload_of(h, spec), steps)
        if spec.state == "bf16":
            h = h.bfloat16().float()
        self._run(
            self._forward,
            exchange,
            gates_ptr=gates.contiguous(),
            bias_ptr=own.contiguous(),
            h_ptr=h.contiguous(),
            c_ptr=h if c is None else c.contiguous(),
            out_ptr=out,
            c_out_ptr=c_out,
            saved_ptr=saved,
            steps=steps,
            epoch=epoch,
            arrived=arrived,
        )
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
        spec, exchange = self._backward.spec, self.exchanges[1]
        steps, batch, _ = out.shape
        dgates = out.new_empty(steps, batch, spec.exchanged)
        drecurrent = torch.empty_like(dgates) if self.cell.splits else dgates
        dh, dc_out = torch.empty_like(h), torch.empty_like(h)
        nothing = h.new_zeros(batch, spec.exchanged)
        epoch, arrived = exchange.start(payload_of(nothing, spec), steps)
        self._run(
            self._backward,
            exchange,
            dout_ptr=dout.contiguous(),
            dc_ptr=torch.zeros_like(h) if dc is None else dc.contiguous(),
            out_ptr=out,
            saved_ptr=saved,
            h_ptr=h.contiguous(),
            c_ptr=h if c is None else c.contiguous(),
            dgates_ptr=dgates,
            drecurrent_ptr=drecurrent,
            dh_ptr=dh,
            dc_out_ptr=dc_out,
            steps=steps,
            epoch=epoch,
            arrived=arrived,
        )
        return dgates, drecurrent, dh, dc_out

    def _run(self, part: Resident, exchange: Exchange, **given: Any) -> None:
        spec = part.spec
        if spec.part not in self._kernels:
            module = load(write(self._edit(emit(spec)), self._folder))
            self._kernels[spec.part] = getattr(module, spec.part)
        given |= part.arguments()
        given["exchange_ptr"] = exchange.words
        given["counter_ptr"], given["error_ptr"] = exchange.counter, exchange.error
        ordered = {name: given[name] for name in arguments(spec)}
        constants = {**sizes(spec), "SPIN": self._spin}
        self._launch(self._kernels[spec.part], spec.programs, {**ordered, **constants})
        if int(exchange.error):
            exchange.error.zero_()
            raise KernelError("a block waited in vain for another one and gave up")
