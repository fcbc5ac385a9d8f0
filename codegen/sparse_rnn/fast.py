"""The fast kernels with their weights and their exchange, ready to launch.

All that counts on from launch to launch lies in the device's memory and is advanced there, in
order with the launches: a CUDA graph that captured some can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP
from graphpar.codegen.sparse_rnn.emit_fast import constants
from graphpar.codegen.sparse_rnn.emit_fast_parts import arguments
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.operands import (
    RESULTS,
    backward_operands,
    forward_operands,
    row_tables,
)
from graphpar.codegen.sparse_rnn.pack import pack, repack
from graphpar.codegen.sparse_rnn.plan import Value, slices_of
from graphpar.codegen.sparse_rnn.spec import power_of_two
from graphpar.errors import KernelError

Launch = Callable[[FastSpec, int, Mapping[str, Any]], None]
"""Runs the kernel of a spec with so many blocks at once, on these arguments."""

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
        pairs = payloads.unflatten(0, (spec.passes, 2))  # passes, 2, N
        if spec.sync == "counter":
            words = pairs[:, 0] | (pairs[:, 1] << 32)
        else:
            words = pairs.transpose(1, 2) | (self.clock[0].to(torch.int64) << 32)
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


class _Part:
    """The packed matrix of a direction, and a kernel for each size of a slice of the batch."""

    def __init__(
        self,
        weight: Tensor,
        gates: int,
        sizes: tuple[int, ...],
        *,
        programs: int,
        warps: int,
        shared_words: int,
        value: Value,
        **fixed: Any,
    ) -> None:
        self._packed = pack(
            weight, gates=gates, programs=programs, threads=WARP * warps, value_type=TYPES[value]
        )
        layout, device = self._packed.layout, weight.device
        self.specs = {
            batch: FastSpec(
                programs=len(layout.units),
                warps=warps,
                register_words=max(layout.depth - shared_words, 0),
                shared_words=min(shared_words, layout.depth),
                rows=power_of_two(layout.units.shape[1]),
                slots=power_of_two(layout.slots.shape[2]),
                value=value,
                batch=batch,
                **fixed,
            )
            for batch in sizes
        }
        spec = self.specs[sizes[0]]
        tables = row_tables(layout, gates, spec.rows, spec.slots)
        self._resident = {
            name: table.contiguous().to(device)
            for name, table in {
                **self._words(),
                "slot_ptr": tables[0],
                "unit_ptr": tables[1],
            }.items()
        }
        self.exchanges = {b: Exchange(s, device) for b, s in self.specs.items()}

    def _words(self) -> dict[str, Tensor]:
        if self._packed.values.dtype.itemsize == 2:
            return {"word_ptr": self._packed.words}
        return {"word_ptr": self._packed.columns, "value_ptr": self._packed.values}

    def update(self, weight: Tensor) -> bool:
        if not repack(self._packed, weight.detach().cpu()):
            return False
        for name, words in self._words().items():
            self._resident[name].copy_(words)
        return True

    def run(self, launch: Launch, first: Tensor, steps: int, **given: Any) -> None:
        """Launch, with ``first`` [B, N] as what the first step receives."""
        spec, exchange = self.specs[len(first)], self.exchanges[len(first)]
        exchange.start(first)
        given |= {**self._resident, **exchange.arguments(), "steps": steps}
        ordered = {name: given[name] for name in arguments(spec)}
        launch(spec, spec.programs, {**ordered, **constants(spec)})
        exchange.advance(steps)
        if not (first.is_cuda and torch.cuda.is_current_stream_capturing()):
            exchange.check()


class Fast:
    """One layer and direction by the fast kernels, for batches of ``batch``.

    A batch of more than ``MAX_BATCH`` columns runs in slices, one launch after another.

    Args:
        weight: [G * H, H], rounded to ``value``.
        programs, warps: blocks, and warps of each.
        shared_words: of each thread's words, those in shared memory.
        value: type of the weights and of what blocks exchange.
        sync: see :class:`FastSpec`.
        save: keep what backward needs.
    """

    def __init__(
        self,
        weight: Tensor,
        cell: str,
        batch: int,
        *,
        launch: Launch,
        programs: int,
        warps: int,
        shared_words: int = 0,
        value: Value = "bf16",
        sync: str = "lamport",
        reverse: bool = False,
        save: bool = True,
    ) -> None:
        self.cell, self._launch = cell_of(cell), launch
        self._slices = slices_of(batch)
        hidden = weight.shape[1]
        fixed: dict[str, Any] = {"cell_name": cell, "hidden": hidden, "sync": sync}
        fixed |= {"reverse": reverse, "save": save, "value": value, "warps": warps}
        fixed |= {"programs": min(programs, hidden), "shared_words": shared_words}
        sizes = tuple(dict.fromkeys(self._slices))
        self._forward = _Part(weight, self.cell.gates, sizes, part="forward", **fixed)
        self._backward = _Part(weight.t().contiguous(), 1, sizes, part="backward", **fixed)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        parts = (self._forward, self._backward)
        return tuple(each for part in parts for each in part.exchanges.values())

    @property
    def specs(self) -> tuple[FastSpec, ...]:
        return tuple(exchange.spec for exchange in self.exchanges)

    def update(self, weight: Tensor) -> bool:
        """Take the values of ``weight``; ``False`` if its pattern grew."""
        return self._forward.update(weight) and self._backward.update(weight.t().contiguous())

    def check(self) -> None:
        """Whether a block gave up in a replayed graph, whose launches cannot ask.

        Raises:
            KernelError: one did.
        """
        for exchange in self.exchanges:
            exchange.check()

    def forward(
        self, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Reference.forward`, for float32 operands."""
        found = []
        for columns in self._columns():
            own = h[columns], None if c is None else c[columns]
            save = self._forward.specs[len(own[0])].save
            given = forward_operands(self.cell, gates[:, columns], bias, *own, save=save)
            self._forward.run(self._launch, own[0], len(gates), **given)
            found.append([given[name] for name in RESULTS["forward"]])
        out, c_out, saved = (_joined(*each) for each in zip(*found, (1, 0, 3), strict=True))
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
        """As :meth:`Reference.backward`."""
        found = []
        for columns in self._columns():
            dc_own, c_own = (None if x is None else x[columns] for x in (dc, c))
            given = backward_operands(
                self.cell,
                dout[:, columns],
                dc_own,
                out[:, columns].contiguous(),
                saved[..., columns].contiguous(),
                h[columns],
                c_own,
            )
            spec = self._backward.specs[len(h[columns])]
            nothing = h.new_zeros(spec.batch, spec.exchanged)
            self._backward.run(self._launch, nothing, len(out), **given)
            found.append([given[name] for name in RESULTS["backward"]])
        each = [_joined(*one) for one in zip(*found, (1, 1, 0, 0), strict=True)]
        return each[0], each[1], each[2], each[3]

    def _columns(self) -> Iterator[slice]:
        start = 0
        for size in self._slices:
            yield slice(start, start + size)
            start += size


def _joined(*parts: Any) -> Tensor:
    """Tensors put together along the dimension that comes last."""
    *tensors, dim = parts
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
