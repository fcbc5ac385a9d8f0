"""One part of a layer and direction by the fast kernels: the packed matrix and its launches.

All that counts on from launch to launch lies in the device's memory and is advanced there, in
order with the launches: a CUDA graph that captured some can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP
from graphpar.codegen.sparse_rnn.emit_fast import constants
from graphpar.codegen.sparse_rnn.emit_fast_parts import arguments
from graphpar.codegen.sparse_rnn.exchange import TYPES, Exchange, capturing
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import Value, element_bytes, slices_of
from graphpar.codegen.sparse_rnn.operands import (
    RESULTS,
    backward_operands,
    forward_operands,
    row_tables,
)
from graphpar.codegen.sparse_rnn.pack import pack
from graphpar.codegen.sparse_rnn.plan import Shape
from graphpar.codegen.sparse_rnn.spec import PartName, power_of_two
from graphpar.errors import KernelError

Launch = Callable[[FastSpec, int, Mapping[str, Any]], None]
"""Runs the kernel of a spec with so many blocks at once, on these arguments."""

_ALIGNMENT = 16  # what kernels are compiled for


class FastPart:
    """The packed matrix of "forward" or "backward", and a kernel for each size of a slice.

    Args:
        weight: [G * H, H], not transposed, whose non-zeros are the pattern.
        programs: blocks. shape: how the kernels are cut.
        value: type of the weights and of what blocks exchange. sync: see :class:`FastSpec`.
        reverse: from the last step to the first.
    """

    def __init__(
        self,
        weight: Tensor,
        cell: str,
        part: PartName,
        *,
        launch: Launch,
        programs: int,
        shape: Shape,
        value: Value = "bf16",
        sync: str = "lamport",
        reverse: bool = False,
    ) -> None:
        self.cell, self._launch, self._shape, self._value = cell_of(cell), launch, shape, value
        gates = self.cell.gates if part == "forward" else 1
        matrix = weight if part == "forward" else weight.t()
        hidden = weight.shape[1]
        packed = pack(
            matrix,
            gates=gates,
            programs=min(programs, hidden),
            threads=WARP * shape.warps * shape.segments,
            value_type=TYPES[value],
            load_bytes=element_bytes(value, shape.columns),
        )
        layout, device = packed.layout, weight.device
        nonzeros = layout.depth * shape.segments
        rows, slots = power_of_two(layout.units.shape[1]), power_of_two(layout.slots.shape[2])
        self._fixed: dict[str, Any] = {
            "cell_name": cell,
            "part": part,
            "hidden": hidden,
            "programs": len(layout.units),
            "warps": shape.warps,
            "register_words": max(nonzeros - shape.shared_words, 0),
            "shared_words": min(shape.shared_words, nonzeros),
            "segments": shape.segments,
            "frugal": shape.frugal,
            "rows": rows,
            "slots": slots,
            "value": value,
            "sync": sync,
            "reverse": reverse,
        }
        tables = row_tables(layout, gates, rows, slots)
        words = packed.columns if value == "fp32" else packed.words
        self._resident = {
            name: table.contiguous().to(device)
            for name, table in {
                "word_ptr": words,
                "slot_ptr": tables[0],
                "unit_ptr": tables[1],
                **({"value_ptr": packed.values} if value == "fp32" else {}),
            }.items()
        }
        source = packed.source
        if part == "backward":  # places in the matrix that is not transposed
            source = source % len(weight) * hidden + source // len(weight)
        small = weight.numel() < 1 << 31
        self._source = source.reshape(-1).to(device, torch.int32 if small else torch.int64)
        self._padding = packed.padding.reshape(-1).to(device)
        self._grown = torch.zeros((), dtype=torch.bool, device=device)
        self.exchanges: dict[tuple[int, bool], Exchange] = {}
        self._stream: Any = None
        self.captured = False

    def prepare(self, batch: int, save: bool) -> None:
        """Make what launches for this batch need and is not there."""
        for size in set(self._slices(batch)):
            self._exchange(size, save)

    def _slices(self, batch: int) -> tuple[int, ...]:
        return slices_of(batch, self._shape.columns)

    def _exchange(self, size: int, save: bool) -> Exchange:
        if (size, save) not in self.exchanges:
            device = self._source.device
            if capturing(device):
                raise KernelError(
                    f"{self.cell.name}: no launch with {size} batch columns came before this CUDA "
                    "graph's capture: call it once before, in training with backward"
                )
            spec = FastSpec(batch=size, save=save, **self._fixed)
            self.exchanges[size, save] = Exchange(spec, device)
        return self.exchanges[size, save]

    def load(self, weight: Tensor) -> Tensor:
        """Take the values of ``weight`` [G * H, H], on its device; returns whether it has
        non-zeros outside of the pattern, as a scalar there. If so, results are NaN from now on,
        until values are loaded that fit."""
        self._wait_for_last()
        flat = weight.detach().reshape(-1)
        found = flat.index_select(0, self._source).masked_fill_(self._padding, 0)
        self._grown.copy_(torch.count_nonzero(found) != torch.count_nonzero(flat))
        found = found.to(TYPES[self._value])
        if self._value == "fp32":
            self._resident["value_ptr"].view(-1).copy_(found)
        else:
            words = self._resident["word_ptr"].view(-1)
            words.bitwise_and_(0xFFFF).bitwise_or_(found.view(torch.int16).int() << 16)
        return self._grown

    def forward(
        self, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None, *, save: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Reference.forward`, for float32 operands."""
        found = []
        for columns in self._columns(len(h)):
            own = h[columns], None if c is None else c[columns]
            given = forward_operands(self.cell, gates[:, columns], bias, *own, save=save)
            self._run(own[0], len(gates), save, given)
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
        for columns in self._columns(len(h)):
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
            nothing = h.new_zeros(columns.stop - columns.start, self.cell.gates * h.shape[1])
            self._run(nothing, len(out), False, given)
            found.append([given[name] for name in RESULTS["backward"]])
        each = [_joined(*one) for one in zip(*found, (1, 1, 0, 0), strict=True)]
        return each[0], each[1], each[2], each[3]

    def check(self) -> None:
        """Whether a block gave up, or the pattern grew, in a replayed graph, whose launches
        cannot ask; waits for the device.

        Raises:
            KernelError: one did.
        """
        for exchange in self.exchanges.values():
            exchange.check()
        if bool(self._grown):
            raise KernelError(
                f"the recurrent weight of {self.cell.name} has non-zeros outside of the pattern "
                "that its kernel holds: results were NaN"
            )

    def _columns(self, batch: int) -> Iterator[slice]:
        """The batch columns of each launch."""
        start = 0
        for size in self._slices(batch):
            yield slice(start, start + size)
            start += size

    def _run(self, first: Tensor, steps: int, save: bool, operands: Mapping[str, Tensor]) -> None:
        """Launch, with ``first`` [B, N] as what the first step receives."""
        exchange = self._exchange(len(first), save)
        spec = exchange.spec
        exchange.told()
        self._wait_for_last()
        exchange.start(first)
        given: dict[str, Any] = {name: _aligned(x) for name, x in operands.items()}
        given |= {**self._resident, **exchange.arguments(), "steps": steps}
        ordered = {name: given[name] for name in arguments(spec)}
        self._launch(spec, spec.programs, {**ordered, **constants(spec)})
        exchange.advance(steps)
        bad = self._grown | (exchange.error != 0)
        for name in RESULTS[spec.part]:
            if name != "saved_ptr":  # what is computed from it starts from the others' gradients
                operands[name].masked_fill_(bad, torch.nan)
        exchange.ask()

    def _wait_for_last(self) -> None:
        """Launches share their memory: one comes after the other, on whatever stream."""
        device = self._source.device
        if device.type != "cuda":
            return
        now, last = torch.cuda.current_stream(device), self._stream
        self._stream = now
        self.captured |= capturing(device)
        if last is None or last == now:
            return
        with torch.cuda.stream(last):
            known = capturing(device)
        if capturing(device) == known:  # what is captured cannot wait for what is not
            now.wait_stream(last)
        if not known and not capturing(device):
            for own in (self._source, self._padding, self._grown, *self._resident.values()):
                own.record_stream(now)
            for exchange in self.exchanges.values():
                for own in exchange.arguments().values():
                    own.record_stream(now)


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy if it starts where kernels do not expect it; results always are new."""
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _joined(*parts: Any) -> Tensor:
    """Tensors put together along the dimension that comes last."""
    *tensors, dim = parts
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
