"""Which recurrences run by the fast kernels, and the packed weights that are kept between calls.

A call takes its values anew from the weight that it is given, on the device, and so never runs on
stale ones; what is kept is a pattern, packed. It serves any weight without non-zeros elsewhere, and
that is asked on the device too. The host waits for the answer, behind the launch, unless the weight
is the one that fitted last time, of the same version; should it have grown all the same, results
are NaN, and the next call raises.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.decide_gpu import no_kernel
from graphpar.codegen.sparse_rnn.devices import Device
from graphpar.codegen.sparse_rnn.exchange import TYPES, capturing
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.fast_part import FastPart, Launch
from graphpar.codegen.sparse_rnn.kept import Entry, Kept, Kind
from graphpar.codegen.sparse_rnn.launch import FastLauncher, planned_device
from graphpar.codegen.sparse_rnn.limits import MAX_BATCH, Value
from graphpar.codegen.sparse_rnn.owners import Later, Owner
from graphpar.codegen.sparse_rnn.spec import PartName, power_of_two
from graphpar.errors import (
    CapacityError,
    GraphparWarning,
    InputError,
    KernelError,
    UnsupportedError,
)

T = TypeVar("T")
VALUES: dict[torch.dtype, Value] = {dtype: value for value, dtype in TYPES.items()}
_FREE_PACKS = 8  # of one kind, before a pattern that changes goes to the library's products
_MOST_ELEMENTS = (1 << 31) - 1
_MOST_LOST = 64  # patterns kept whose weight is gone: a masked weight is a new one each time
_SWEEP = 64  # calls between looks for weights that are gone


@dataclass(frozen=True, slots=True)
class Backend:
    """What launches kernels, and the device that they are planned for."""

    launch: Launch
    device: Device


class Kernels:
    """Runs recurrences by kernels where those exist and fit.

    Args:
        backend: for all devices; else each GPU has its own.

    Attributes:
        served: calls that ran by kernels.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self._given = backend
        self._backends: dict[torch.device, Backend] = {}
        self._kept: dict[Kind, Kept] = {}
        self._warned: set[str] = set()
        self._tick = self.served = 0
        self._lock = threading.RLock()  # autograd runs backward in threads of its own

    def forward(
        self,
        gates: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Tensor | None,
        h: Tensor,
        c: Tensor | None,
        cell: str,
        reverse: bool,
        save: bool,
        strict: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """As :func:`stepwise.forward`, of the op's operands, in float32; ``None``: it is the
        library's. ``strict``: what does not fit, or is not supported, is an error.

        Raises:
            CapacityError, UnsupportedError: if ``strict``. KernelError: a launch failed.
        """
        kind = self._kind("forward", gates, weight, projection, cell, reverse)
        if kind is None:
            return None
        given = [None if t is None else t.float() for t in (gates, bias, h, c)]

        def launch(part: FastPart) -> tuple[Tensor, Tensor, Tensor]:
            out, last, saved = part.forward(*given, save=save)  # type: ignore[arg-type]
            return out, last if c is not None else last.new_empty(0), saved

        return self._run(kind, weight, gates.shape[1], save, launch, strict)

    def backward(
        self,
        dout: Tensor,
        dc: Tensor | None,
        out: Tensor,
        saved: Tensor,
        weight: Tensor,
        projection: Tensor | None,
        h: Tensor,
        c: Tensor | None,
        cell: str,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        """As :func:`stepwise.backward`, of the op's operands, in float32; ``None``: it is the
        library's."""
        kind = self._kind("backward", dout, weight, projection, cell, reverse)
        if kind is None:
            return None
        given = [None if t is None else t.float() for t in (dout, dc, out, saved, h, c)]

        def launch(part: FastPart) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            dgates, drecurrent, dh, dc_first = part.backward(*given)  # type: ignore[arg-type]
            nothing = dgates.new_empty
            return (
                dgates,
                drecurrent if part.cell.splits else nothing(0),
                dh,
                nothing(0) if c is None else dc_first,
                nothing(0, *out.shape[1:]),
            )

        return self._run(kind, weight, dout.shape[1], False, launch, False)

    def check(self) -> None:
        """Whether a block gave up, or a pattern grew, in a replayed CUDA graph; waits for the
        devices.

        Raises:
            KernelError: one did.
        """
        for kept in self._kept.values():
            for entry in kept.entries:
                entry.part.check()

    def clear(self) -> None:
        """Forget all patterns; not while a CUDA graph may still be replayed."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        """The number of packed patterns."""
        return sum(len(kept.entries) for kept in self._kept.values())

    # --- what can run ---

    def _kind(
        self,
        part: PartName,
        sequence: Tensor,
        weight: Tensor,
        projection: Tensor | None,
        cell: str,
        reverse: bool,
    ) -> Kind | None:
        if self._given is None and weight.device.type != "cuda":
            return None
        if not sequence.numel() or not weight.numel():
            return None
        reason = no_kernel(cell, weight, weight.dtype)
        if projection is not None:  # as wide as the state, perhaps
            reason = "a kernel has no projections"
        widest = max(weight.shape[0], cell_of(cell).saved * weight.shape[1])
        if len(sequence) * min(sequence.shape[1], MAX_BATCH) * widest > _MOST_ELEMENTS:
            reason = f"{len(sequence)} steps: a kernel counts elements in 32 bits"
        shape = tuple(weight.shape)
        columns = min(power_of_two(sequence.shape[1]), MAX_BATCH)
        kind = Kind(part, cell, shape, weight.dtype, weight.device, reverse, columns)
        if reason:
            self._to_library(kind, reason)
            return None
        return kind

    def _backend(self, device: torch.device) -> Backend:
        if self._given is not None:
            return self._given
        if device not in self._backends:
            self._backends[device] = Backend(FastLauncher(), planned_device(device))
        return self._backends[device]

    def _to_library(self, kind: Kind, reason: str) -> None:
        if capturing(kind.device):
            raise KernelError(
                f"{kind.cell} of {kind.shape[1]} units cannot be captured in a CUDA graph: it runs "
                f"by the library's sparse products, which wait for the device ({reason})"
            )
        name = f"the {kind.part} of {kind.cell} with a weight {list(kind.shape)}"
        message = f"{name} runs by the library's sparse products: {reason}"
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, GraphparWarning, stacklevel=2)

    # --- patterns ---

    def _run(
        self,
        kind: Kind,
        weight: Tensor,
        batch: int,
        save: bool,
        launch: Callable[[FastPart], T],
        strict: bool,
    ) -> T | None:
        on = torch.cuda.device(kind.device) if kind.device.type == "cuda" else nullcontext()
        with self._lock, on:
            self._tick += 1
            if self._tick % _SWEEP == 0:
                self._sweep()
            kept = self._kept.setdefault(kind, Kept())
            try:
                found = self._serve(kept, kind, weight, batch, save, launch)
                self.served += 1
                return found
            except (CapacityError, UnsupportedError, InputError) as error:
                kept.refuse(type(error)(str(error)))  # as it is, it would keep tensors of frames
            except _Refused:
                pass
            fault = kept.fault
            if strict and fault is not None and not isinstance(fault, InputError):
                raise type(fault)(str(fault))
            self._to_library(kind, str(fault or "its pattern changes often"))
            return None

    def _serve(
        self,
        kept: Kept,
        kind: Kind,
        weight: Tensor,
        batch: int,
        save: bool,
        launch: Callable[[FastPart], T],
    ) -> T:
        candidates = kept.candidates(weight)
        if capturing(kind.device):
            if not candidates:
                raise KernelError(
                    f"no call of {kind.cell} with a weight {list(kind.shape)} came before this "
                    "CUDA graph's capture: call it once before, in training with backward"
                )
            kept.last = candidates[0]
            kept.last.part.load(weight)  # a graph takes values anew at each replay
            return launch(kept.last.part)
        for place, entry in enumerate(candidates):
            entry.raise_late()
            known = entry.owner.has(weight)
            trusted = entry.owner.stands(weight) and _answers_late(kind.device)
            grown = entry.part.load(weight)
            if trusted:
                found = launch(entry.part)
                entry.ask_late(grown)
                kept.accept(entry, weight, self._tick)
                return found
            if place or kept.missed:  # a guess is no longer worth a launch
                if not bool(grown):
                    kept.accept(entry, weight, self._tick)
                    return launch(entry.part)
            else:
                later = Later(grown)
                found = launch(entry.part)
                if not later.value():
                    kept.accept(entry, weight, self._tick)
                    return found
            if known and not entry.part.captured:
                kept.drop(entry)
        kept.missed = True
        if kept.wait:
            kept.wait -= 1
            raise _Refused
        return self._pack(kept, kind, weight, batch, save, launch)

    def _pack(
        self,
        kept: Kept,
        kind: Kind,
        weight: Tensor,
        batch: int,
        save: bool,
        launch: Callable[[FastPart], T],
    ) -> T:
        backend, value = self._backend(kind.device), VALUES[kind.dtype]
        weight = weight.detach()
        given: dict[str, Any] = {"batch": kind.columns, "device": backend.device, "value": value}
        plan = plan_of(weight, kind.cell, kind.part, **given)
        part = FastPart(
            weight,
            kind.cell,
            kind.part,
            launch=backend.launch,
            programs=plan.programs,
            shape=plan.shape,
            value=value,
            reverse=kind.reverse,
        )
        part.prepare(batch, save)
        found = launch(part)
        entry = Entry(part, Owner.none())
        kept.entries.append(entry)
        kept.accept(entry, weight, self._tick)
        kept.packs += 1
        kept.fault = None
        if kept.packs > _FREE_PACKS:
            kept.refuse(None)
        self._sweep()
        return found

    def _sweep(self) -> None:
        """Drop patterns whose weight is gone: at once if it was there for several calls."""
        lost = []
        for kept in self._kept.values():
            for entry in list(kept.entries):
                if entry.part.captured or not entry.owner.gone():
                    continue
                if entry.kept:
                    kept.drop(entry)
                else:
                    lost.append((entry.used, kept, entry))
        idle = self._tick - max(4 * _SWEEP, 8 * len(self))
        lost.sort(key=lambda each: -each[0])
        for place, (used, kept, entry) in enumerate(lost):
            if place >= _MOST_LOST or used < idle:
                kept.drop(entry)
        self._kept = {kind: kept for kind, kept in self._kept.items() if not kept.forgotten}


def _answers_late(device: torch.device) -> bool:
    """Whether to ask a device is to wait for it."""
    return device.type == "cuda"


class _Refused(Exception):
    """No kernel was tried: it is too soon after one that did not fit."""


_ACTIVE = [Kernels()]


def active() -> Kernels:
    """The kernels of this process."""
    return _ACTIVE[-1]


@contextmanager
def using(kernels: Kernels) -> Iterator[Kernels]:
    """Run recurrences by other kernels than the process's own within, on all threads."""
    _ACTIVE.append(kernels)
    try:
        yield kernels
    finally:
        _ACTIVE.remove(kernels)


def launching(launch: Launch, device: Device) -> AbstractContextManager[Kernels]:
    """Run recurrences of all devices, the CPU too, by kernels that ``launch`` runs, planned for
    ``device``: how tests interpret what a GPU would run. The patterns are this context's own."""
    return using(Kernels(Backend(launch, device)))
