"""The fast kernel with its weights and its exchange, ready to launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from graphpar.codegen.sparse_rnn.plan import BATCH_PER_WORD
from graphpar.codegen.sparse_rnn.reference import MAX_EPOCH
from graphpar.codegen.sparse_rnn.spec import power_of_two
from graphpar.errors import KernelError

Launch = Callable[[FastSpec, int, Mapping[str, Any]], None]
"""Runs the kernel of a spec with so many blocks at once, on these arguments."""


class _Part:
    """The packed matrix of a direction, and the exchange of its kernel."""

    def __init__(
        self, weight: Tensor, gates: int, programs: int, warps: int, shared_words: int, **fixed: Any
    ) -> None:
        self._packed = pack(
            weight, gates=gates, programs=programs, threads=WARP * warps, value_type=torch.bfloat16
        )
        layout = self._packed.layout
        self.spec = FastSpec(
            programs=len(layout.units),
            warps=warps,
            register_words=max(layout.depth - shared_words, 0),
            shared_words=min(shared_words, layout.depth),
            rows=power_of_two(layout.units.shape[1]),
            slots=power_of_two(layout.slots.shape[2]),
            **fixed,
        )
        device, rows, slots = weight.device, self.spec.rows, self.spec.slots
        self.words = self._packed.words.contiguous().to(device)
        tables = row_tables(layout, gates, rows, slots)
        self.slots, self.units = (table.to(device) for table in tables)
        self.exchange = torch.zeros(self.spec.words, dtype=torch.int64, device=device)
        self._error = torch.zeros(1, dtype=torch.int32, device=device)
        self._epoch = 1

    def update(self, weight: Tensor) -> bool:
        if not repack(self._packed, weight.detach().cpu()):
            return False
        self.words.copy_(self._packed.words)
        return True

    def run(self, launch: Launch, first: Tensor, steps: int, **given: Any) -> None:
        """Launch, with ``first`` [B, N] as what the first step receives."""
        given |= {"word_ptr": self.words, "slot_ptr": self.slots, "unit_ptr": self.units}
        given |= {"exchange_ptr": self.exchange, "error_ptr": self._error, "steps": steps}
        given["epoch"] = self._start(first, steps)
        ordered = {name: given[name] for name in arguments(self.spec)}
        launch(self.spec, self.spec.programs, {**ordered, **constants(self.spec)})
        if int(self._error):
            self._error.zero_()
            raise KernelError("a block waited in vain for another one and gave up")

    def _start(self, first: Tensor, steps: int) -> int:
        """Write the words of the first epoch; epochs for ``steps`` steps are used up."""
        if self._epoch + steps >= MAX_EPOCH:
            self.exchange.zero_()
            self._epoch = 1
        epoch, spec = self._epoch, self.spec
        padded = F.pad(first, (0, 0, 0, spec.passes * BATCH_PER_WORD - spec.batch))
        halves = padded.bfloat16().view(torch.int16).to(torch.int64) & 0xFFFF
        pairs = halves.unflatten(0, (spec.passes, 2, 2))
        words = pairs[:, :, 0] | (pairs[:, :, 1] << 16) | (epoch << 32)  # passes, 2, N
        flat = words.transpose(1, 2).reshape(-1)
        self.exchange[: len(flat)] = flat
        self._epoch = epoch + steps + 1
        return epoch


class Fast:
    """One layer and direction by the fast kernels; weights [G * H, H] are rounded to bf16.

    ``shared_words``: of each thread's words, those in shared memory.
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
        reverse: bool = False,
        save: bool = True,
    ) -> None:
        self.cell, self._launch = cell_of(cell), launch
        hidden = weight.shape[1]
        fixed: dict[str, Any] = {"cell_name": cell, "hidden": hidden, "batch": batch}
        fixed |= {"reverse": reverse, "save": save}
        sizes = min(programs, hidden), warps, shared_words
        self._forward = _Part(weight, self.cell.gates, *sizes, part="forward", **fixed)
        self._backward = _Part(weight.t().contiguous(), 1, *sizes, part="backward", **fixed)

    @property
    def exchanges(self) -> tuple[Tensor, Tensor]:
        return self._forward.exchange, self._backward.exchange

    @property
    def specs(self) -> tuple[FastSpec, FastSpec]:
        return self._forward.spec, self._backward.spec

    def update(self, weight: Tensor) -> bool:
        """Take the values of ``weight``; ``False`` if its pattern grew."""
        return self._forward.update(weight) and self._backward.update(weight.t().contiguous())

    def forward(
        self, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Reference.forward`, for float32 operands."""
        given = forward_operands(self.cell, gates, bias, h, c, save=self._forward.spec.save)
        self._forward.run(self._launch, h, len(gates), **given)
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
        """As :meth:`Reference.backward`."""
        spec = self._backward.spec
        given = backward_operands(self.cell, dout, dc, out, saved, h, c)
        nothing = h.new_zeros(spec.batch, spec.exchanged)
        self._backward.run(self._launch, nothing, len(out), **given)
        dgates, drecurrent, dh, dc_out = (given[name] for name in RESULTS["backward"])
        return dgates, drecurrent, dh, dc_out
