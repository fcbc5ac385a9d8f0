"""The fast kernel with its weights and its exchange, ready to launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.emit_fast import ARGUMENTS, constants
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.pack import pack, repack
from graphpar.codegen.sparse_rnn.plan import BATCH_PER_WORD
from graphpar.codegen.sparse_rnn.reference import MAX_EPOCH
from graphpar.codegen.sparse_rnn.spec import power_of_two
from graphpar.errors import KernelError

Launch = Callable[[FastSpec, int, Mapping[str, Any]], None]
"""Runs the kernel of a spec with so many blocks at once, on these arguments."""


class FastForward:
    """One layer and direction by the fast kernel; weights [G * H, H] are rounded to bf16.

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
        self._packed = pack(
            weight,
            gates=self.cell.gates,
            programs=min(programs, hidden),
            threads=32 * warps,
            value_type=torch.bfloat16,
        )
        layout = self._packed.layout
        self.spec = FastSpec(
            cell_name=cell,
            hidden=hidden,
            batch=batch,
            programs=len(layout.units),
            warps=warps,
            register_words=max(layout.depth - shared_words, 0),
            shared_words=min(shared_words, layout.depth),
            rows=power_of_two(layout.units.shape[1]),
            slots=power_of_two(layout.slots.shape[2]),
            reverse=reverse,
            save=save,
        )
        device, rows, slots = weight.device, self.spec.rows, self.spec.slots
        table = torch.from_numpy(layout.slots).unflatten(1, (self.cell.gates, -1))
        more = (0, slots - table.shape[3], 0, rows - table.shape[2])
        self._slots = F.pad(table, more, value=layout.threads - 1).contiguous().to(device)
        units = torch.from_numpy(layout.units)
        self._units = F.pad(units, (0, rows - units.shape[1]), value=-1).contiguous().to(device)
        self._words = self._packed.words.contiguous().to(device)
        self.exchange = torch.zeros(self.spec.words, dtype=torch.int64, device=device)
        self._error = torch.zeros(1, dtype=torch.int32, device=device)
        self._epoch = 1

    def update(self, weight: Tensor) -> bool:
        """Take the values of ``weight``; ``False``, and nothing is done, if its pattern grew."""
        if not repack(self._packed, weight.detach().cpu()):
            return False
        self._words.copy_(self._packed.words)
        return True

    def forward(
        self, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Reference.forward`, for float32 operands."""
        spec = self.spec
        own = h.new_zeros(spec.hidden)
        if bias is not None:
            added, own = bias, bias[-spec.hidden :]
            if self.cell.splits:
                added = torch.cat((bias[: -spec.hidden], torch.zeros_like(own)))
            gates = gates + added
        steps = len(gates)
        out, c_out = h.new_empty(steps, spec.batch, spec.hidden), torch.empty_like(h)
        saved = h.new_empty(steps if spec.save else 0, self.cell.saved, spec.hidden, spec.batch)
        given = {
            "word_ptr": self._words,
            "slot_ptr": self._slots,
            "unit_ptr": self._units,
            "gates_ptr": gates.contiguous(),
            "bias_ptr": own.contiguous(),
            "h_ptr": h.contiguous(),
            "c_ptr": h if c is None else c.contiguous(),
            "exchange_ptr": self.exchange,
            "error_ptr": self._error,
            "out_ptr": out,
            "c_out_ptr": c_out,
            "saved_ptr": saved,
            "steps": steps,
            "epoch": self._start(h, steps),
        }
        ordered = {name: given[name] for name in ARGUMENTS}
        self._launch(spec, spec.programs, {**ordered, **constants(spec)})
        if int(self._error):
            self._error.zero_()
            raise KernelError("a block waited in vain for another one and gave up")
        return out, c_out, saved

    def _start(self, h: Tensor, steps: int) -> int:
        """Write the words of the first state; epochs for ``steps`` steps are used up."""
        if self._epoch + steps >= MAX_EPOCH:
            self.exchange.zero_()
            self._epoch = 1
        epoch, spec = self._epoch, self.spec
        padded = F.pad(h, (0, 0, 0, spec.passes * BATCH_PER_WORD - spec.batch))
        columns = (padded.bfloat16().view(torch.int16).to(torch.int64) & 0xFFFF).unflatten(
            0, (spec.passes, 2, 2)
        )
        words = columns[:, :, 0] | (columns[:, :, 1] << 16) | (epoch << 32)  # passes, 2, H
        flat = words.transpose(1, 2).reshape(-1)
        self.exchange[: len(flat)] = flat
        self._epoch = epoch + steps + 1
        return epoch
