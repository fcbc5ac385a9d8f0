"""The fast kernels of a layer and direction, forward and backward, ready to launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import Device
from graphpar.codegen.sparse_rnn.exchange import Exchange
from graphpar.codegen.sparse_rnn.fast_part import FastPart, Launch
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import Value
from graphpar.codegen.sparse_rnn.plan import Plan, Shape, plan_kernel
from graphpar.codegen.sparse_rnn.spec import PartName
from graphpar.errors import KernelError


def plan_of(
    weight: Tensor, cell: str, part: PartName, *, batch: int, device: Device, value: Value
) -> Plan:
    """The plan with the least modelled time for ``weight`` [G * H, H] and one part.

    Raises:
        CapacityError: it does not fit; the message says what would.
    """
    nonzero = weight.detach() != 0
    if part == "forward":
        rows = nonzero.sum(1).reshape(cell_of(cell).gates, -1)
    else:
        rows = nonzero.sum(0)[None]
    columns = weight.shape[1 if part == "forward" else 0]
    return plan_kernel(
        cell, rows.cpu().numpy(), columns, batch=batch, device=device, value=value, part=part
    )


class Fast:
    """One layer and direction by the fast kernels, for batches of ``batch``.

    Larger batches than a launch takes run in slices, one launch after another.

    Args:
        weight: [G * H, H], rounded to ``value``.
        programs: blocks.
        shape, backward: how the kernels are cut; backward's is forward's by default.
        save: keep what backward needs.
        options: ``value``, ``sync`` and ``reverse`` of :class:`FastPart`.
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
        save: bool = True,
        **options: Any,
    ) -> None:
        self._save = save
        given: dict[str, Any] = {"launch": launch, "programs": programs, **options}
        self._forward = FastPart(weight, cell, "forward", shape=shape, **given)
        self._forward.prepare(batch, save)
        self._backward = None
        if save:
            self._backward = FastPart(weight, cell, "backward", shape=backward or shape, **given)
            self._backward.prepare(batch, save=False)

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
        given: dict[str, Any] = {"batch": batch, "device": device}
        given["value"] = options.get("value", "bf16")
        plan = plan_of(weight, cell, "forward", **given)
        backward = None
        if options.get("save", True):
            backward = plan_of(weight, cell, "backward", **given).shape
        shapes: dict[str, Any] = {"shape": plan.shape, "backward": backward}
        return cls(weight, cell, batch, launch=launch, programs=plan.programs, **shapes, **options)

    @property
    def _parts(self) -> tuple[FastPart, ...]:
        return tuple(p for p in (self._forward, self._backward) if p is not None)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(e for part in self._parts for e in part.exchanges.values())

    @property
    def specs(self) -> tuple[FastSpec, ...]:
        return tuple(exchange.spec for exchange in self.exchanges)

    def update(self, weight: Tensor) -> bool:
        """Take the values of ``weight``; ``False`` if its pattern grew: then results are NaN."""
        grown = [bool(part.load(weight)) for part in self._parts]
        return not any(grown)

    def check(self) -> None:
        """See :meth:`FastPart.check`."""
        for part in self._parts:
            part.check()

    def forward(
        self, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Reference.forward`, for float32 operands."""
        return self._forward.forward(gates, bias, h, c, save=self._save)

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
        return self._backward.backward(dout, dc, out, saved, h, c)
