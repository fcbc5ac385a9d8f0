"""The fast kernels with their weights and their exchange, ready to launch.

All that counts on from launch to launch lies in the device's memory and is advanced there, in
order with the launches: a CUDA graph that captured some can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP, Device
from graphpar.codegen.sparse_rnn.emit_fast import constants
from graphpar.codegen.sparse_rnn.emit_fast_parts import arguments
from graphpar.codegen.sparse_rnn.exchange import TYPES, Exchange
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import Value, element_bytes, slices_of
from graphpar.codegen.sparse_rnn.operands import (
    RESULTS,
    backward_operands,
    forward_operands,
    row_tables,
)
from graphpar.codegen.sparse_rnn.pack import pack, repack
from graphpar.codegen.sparse_rnn.plan import Shape, plan_kernel
from graphpar.codegen.sparse_rnn.spec import power_of_two
from graphpar.errors import KernelError

Launch = Callable[[FastSpec, int, Mapping[str, Any]], None]
"""Runs the kernel of a spec with so many blocks at once, on these arguments."""


class _Part:
    """The packed matrix of a direction, and a kernel for each size of a slice of the batch."""

    def __init__(
        self,
        weight: Tensor,
        gates: int,
        batch: int,
        shape: Shape,
        *,
        programs: int,
        value: Value,
        **fixed: Any,
    ) -> None:
        self.slices = slices_of(batch, shape.columns)
        warps, shared_words = shape.warps, shape.shared_words
        self._packed = pack(
            weight,
            gates=gates,
            programs=programs,
            threads=WARP * warps * shape.segments,
            value_type=TYPES[value],
            load_bytes=element_bytes(value, self.slices[0]),
        )
        layout, device = self._packed.layout, weight.device
        nonzeros = layout.depth * shape.segments
        self.specs = {
            size: FastSpec(
                programs=len(layout.units),
                warps=warps,
                register_words=max(nonzeros - shared_words, 0),
                shared_words=min(shared_words, nonzeros),
                segments=shape.segments,
                frugal=shape.frugal,
                rows=power_of_two(layout.units.shape[1]),
                slots=power_of_two(layout.slots.shape[2]),
                value=value,
                batch=size,
                **fixed,
            )
            for size in set(self.slices)
        }
        spec = self.specs[self.slices[0]]
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

    def columns(self) -> Iterator[slice]:
        """The batch columns of each launch."""
        start = 0
        for size in self.slices:
            yield slice(start, start + size)
            start += size

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

    Larger batches than a launch takes run in slices, one launch after another.

    Args:
        weight: [G * H, H], rounded to ``value``.
        programs: blocks.
        shape, backward: how the kernels are cut; backward's is forward's by default.
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
        shape: Shape,
        backward: Shape | None = None,
        value: Value = "bf16",
        sync: str = "lamport",
        reverse: bool = False,
        save: bool = True,
    ) -> None:
        self.cell, self._launch = cell_of(cell), launch
        hidden = weight.shape[1]
        fixed: dict[str, Any] = {"cell_name": cell, "hidden": hidden, "sync": sync}
        fixed |= {"reverse": reverse, "save": save, "value": value}
        fixed |= {"programs": min(programs, hidden)}
        self._forward = _Part(weight, self.cell.gates, batch, shape, part="forward", **fixed)
        turned, other = weight.t().contiguous(), backward or shape
        self._backward = _Part(turned, 1, batch, other, part="backward", **fixed) if save else None

    @classmethod
    def planned(
        cls,
        weight: Tensor,
        cell: str,
        batch: int,
        *,
        launch: Launch,
        device: Device,
        **options: Any,
    ) -> Fast:
        """The kernels with the least modelled time on a device; ``options`` as above.

        Raises:
            CapacityError: they do not fit; the message says what would.
        """
        nonzero = (weight != 0).cpu()
        given: dict[str, Any] = {"batch": batch, "device": device}
        given["value"] = options.get("value", "bf16")
        rows = nonzero.sum(1).reshape(cell_of(cell).gates, -1).numpy()
        plan = plan_kernel(cell, rows, weight.shape[1], **given)
        backward = None
        if options.get("save", True):
            turned = nonzero.sum(0)[None].numpy()
            backward = plan_kernel(cell, turned, len(weight), part="backward", **given).shape
        shapes: dict[str, Any] = {"shape": plan.shape, "backward": backward}
        return cls(weight, cell, batch, launch=launch, programs=plan.programs, **shapes, **options)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        parts = (self._forward, self._backward)
        return tuple(e for part in parts if part is not None for e in part.exchanges.values())

    @property
    def specs(self) -> tuple[FastSpec, ...]:
        return tuple(exchange.spec for exchange in self.exchanges)

    def update(self, weight: Tensor) -> bool:
        """Take the values of ``weight``; ``False`` if its pattern grew."""
        if not self._forward.update(weight):
            return False
        return self._backward is None or self._backward.update(weight.t().contiguous())

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
        for columns in self._forward.columns():
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
        if self._backward is None:
            raise KernelError("backward needs what forward saves: make it with save=True")
        found = []
        for columns in self._backward.columns():
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


def _joined(*parts: Any) -> Tensor:
    """Tensors put together along the dimension that comes last."""
    *tensors, dim = parts
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
