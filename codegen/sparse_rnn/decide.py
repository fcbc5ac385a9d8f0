"""Whether a recurrence is worth its sparse form: measured density, modelled time, a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.decide_gpu import RUN_ON_GPUS, gpu_plans, no_kernel
from graphpar.codegen.sparse_rnn.pack import MAX_COLUMNS
from graphpar.errors import CapacityError, UnsupportedError

BREAK_EVEN = 1.1
"""The modelled gain from which on "auto" takes the sparse form."""


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Time of the steps on one core; the defaults are rates measured on a server's core.

    ``dense_bytes_per_us``: rate of a product with one column; more columns take ``dense_batch``
    times as long. ``nonzero_us``: of a non-zero of 32 bits with one column; each further one
    takes ``nonzero_batch`` of that. ``step_us``: of what is no product, more than the
    dense op needs. ``check_us``: per element of the matrix and call, to find its non-zeros again.
    """

    dense_bytes_per_us: float = 17e3
    dense_batch: float = 2.2
    nonzero_us: float = 3.4e-4
    nonzero_batch: float = 0.67
    step_us: float = 40.0
    check_us: float = 1e-3

    def dense(self, elements: int, itemsize: int, batch: int) -> float:
        """Microseconds of a dense step."""
        once = elements * itemsize / self.dense_bytes_per_us
        return once * (1 if batch == 1 else self.dense_batch * max(1, batch / 4))

    def sparse(self, elements: int, nonzeros: int, itemsize: int, batch: int, steps: int) -> float:
        """Microseconds of a sparse step, with its share of what a call costs."""
        each = self.nonzero_us * (1 + self.nonzero_batch * (batch - 1)) * (itemsize + 4) / 8
        return self.step_us + each * nonzeros + self.check_us * elements / max(steps, 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one layer and direction, and why.

    ``density`` of the recurrent matrix and ``speedup``, modelled, are ``None`` where unknown.
    """

    lowered: bool
    reason: str
    density: float | None = None
    speedup: float | None = None

    def __str__(self) -> str:
        return f"{'sparse' if self.lowered else 'dense'}: {self.reason}"


def decide(
    cell: str,
    weight: Tensor | None,
    *,
    steps: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    mode: bool | str,
    model: CpuModel = CpuModel(),
    trains: bool = True,
) -> Decision:
    """Decide for a recurrent matrix ``weight`` [G * H, P]; ``None`` if its values are unknown.

    ``mode``: True lowers whatever can be, "auto" what the model calls faster. ``trains``: gradients
    pass through the recurrence, so that on a GPU its backward counts, too.
    """
    cell_of(cell)
    if mode is False:
        return Decision(False, "sparse_rnn=False")
    if weight is not None and weight.shape[1] > MAX_COLUMNS:
        return Decision(False, f"{weight.shape[1]} units: a 16-bit index counts {MAX_COLUMNS}")
    if weight is None:
        known = "its recurrent weight has no values yet"
        return Decision(mode is True, "sparse_rnn=True" if mode is True else known)
    nonzeros = int(torch.count_nonzero(weight))
    density = nonzeros / max(1, weight.numel())
    if not bool(torch.isfinite(weight).all()):
        return Decision(False, "its recurrent weight has values that are not finite", density)
    if device.type == "cuda":
        return _on_gpu(cell, weight, batch, dtype, device, mode, density, trains)
    if device.type != "cpu":
        if mode is True:
            return Decision(True, "sparse_rnn=True", density)
        return Decision(False, f"no kernel for {device.type} yet", density)
    dense = model.dense(weight.numel(), dtype.itemsize, batch)
    sparse = model.sparse(weight.numel(), nonzeros, dtype.itemsize, batch, steps)
    speedup = dense / sparse
    times = f"{sparse:.0f} us a step, dense {dense:.0f} us"
    if mode is True:
        return Decision(True, f"sparse_rnn=True ({times})", density, speedup)
    if speedup < BREAK_EVEN:
        return Decision(False, f"not faster: {times}", density, speedup)
    return Decision(True, f"faster: {times}", density, speedup)


def _on_gpu(
    cell: str,
    weight: Tensor,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    mode: bool | str,
    density: float,
    trains: bool,
) -> Decision:
    """True raises where no kernel can be had; where there is none at all it is the library's."""
    fault = no_kernel(cell, weight, dtype)
    if fault:
        by_library = f"sparse_rnn=True, by the library's products: {fault}"
        return Decision(mode is True, by_library if mode is True else fault, density)
    try:
        given: dict[str, Any] = {"batch": batch, "dtype": dtype, "device": device}
        plans, fault = gpu_plans(cell, weight, trains=trains, **given)
    except (CapacityError, UnsupportedError) as error:
        if mode is True:
            raise
        return Decision(False, str(error), density)
    fast, dense = sum(p.step_us for p in plans), sum(p.dense_us for p in plans)
    times = f"modelled {fast:.1f} us a step{_and_back(len(plans))}, dense {dense:.1f} us"
    if mode is True:
        if fault:
            times += f"; backward is the library's: it {fault}"
        return Decision(True, f"sparse_rnn=True ({times})", density, dense / fast)
    if fault:
        return Decision(False, f"its backward {fault}", density)
    speedup = dense / fast
    if speedup < BREAK_EVEN:
        return Decision(False, f"not faster: {times}", density, speedup)
    if not RUN_ON_GPUS:
        reason = f"its kernels have run on no GPU yet, sparse_rnn=True runs them ({times})"
        return Decision(False, reason, density, speedup)
    return Decision(True, f"faster: {times}", density, speedup)


def _and_back(plans: int) -> str:
    return " and back" if plans > 1 else ""
