"""What the tests of the op by kernels share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.kernels import Kernels, using
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from tests.unit.test_sparse_recurrence import WIDTH

SMALL = replace(DEVICES["sm_90"], multiprocessors=3)
HIDDEN = 8
LIMITS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of one element, and of a whole. Of 16 bits a state, or a gate's gradient, is rounded at every
step, relative 2^-11 or 2^-8."""


def module_of(name: str, hidden: int, *, bidirectional: bool = False) -> Any:
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU}
    options: dict[str, Any] = {"bidirectional": bidirectional}
    if name not in kinds:
        options["nonlinearity"] = name.removeprefix("rnn_")
    return kinds.get(name, nn.RNN)(WIDTH, hidden, **options)


def sparse(weight: Tensor, density: float = 0.2) -> None:
    """Zeros at random; one row is empty, one is full."""
    with torch.no_grad():
        weight.mul_(torch.rand_like(weight) < density)
        weight[0], weight[-1] = 0, 0.05


def cell_run(weight: Tensor, seed: int = 0, cell: str = "rnn_tanh", batch: int = 1) -> Tensor:
    """The states of two steps with ``weight``; float32."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.randn(2, batch, weight.shape[0], generator=generator).to(weight.dtype)
    h = 0.5 * torch.randn(batch, weight.shape[1], generator=generator).to(weight.dtype)
    c = torch.zeros_like(h) if cell == "lstm" else None
    return sparse_rnn(gates, weight, None, None, h, c, cell)[0]


def by_products(weight: Tensor, seed: int = 0, cell: str = "rnn_tanh", batch: int = 1) -> Tensor:
    with library():
        return cell_run(weight, seed, cell, batch)


def matrix(seed: int = 0, density: float = 0.3, gates: int = 1, hidden: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = gates * hidden, hidden
    return torch.randn(shape, generator=generator) * (
        torch.rand(shape, generator=generator) < density
    )


def library() -> AbstractContextManager[Kernels]:
    """No kernels within."""
    return using(Kernels())
