"""What a GPU could make of a recurrence: its plan, or why there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.exchange import TYPES
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.launch import planned_device
from graphpar.codegen.sparse_rnn.plan import Plan
from graphpar.errors import CapacityError

RUN_ON_GPUS = False
"""Whether benchmarks/gpu_sparse_rnn.py has passed on a GPU. Until then "auto" does not choose what
only interpreters and compilers have seen."""


def no_kernel(cell: str, weight: Tensor, dtype: torch.dtype) -> str:
    """Why there is no kernel of such a recurrence on any GPU; empty if there is."""
    if weight.shape[0] != cell_of(cell).gates * weight.shape[1]:
        return "a kernel has no projections"
    if dtype not in TYPES.values():
        return f"a kernel takes {', '.join(map(str, TYPES.values()))}, not {dtype}"
    return ""


def gpu_plans(
    cell: str, weight: Tensor, *, batch: int, dtype: torch.dtype, device: torch.device, trains: bool
) -> tuple[list[Plan], str]:
    """The plans of forward and, if it ``trains``, of backward; or why that does not fit.

    Raises:
        CapacityError: forward does not fit. UnsupportedError: the device runs no kernels.
    """
    planned = planned_device(device)
    value = next(name for name, each in TYPES.items() if each == dtype)
    plans = [plan_of(weight, cell, "forward", batch=batch, device=planned, value=value)]
    if trains:
        try:
            given: dict[str, Any] = {"batch": batch, "device": planned, "value": value}
            plans.append(plan_of(weight, cell, "backward", **given))
        except CapacityError as error:
            return plans, str(error)
    return plans, ""
