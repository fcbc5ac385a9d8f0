"""The op sparse_rnn by the fast kernels, interpreted, against autograd of the unmodified modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.exchange import TYPES
from graphpar.codegen.sparse_rnn.kernels import Kernels, launching
from tests.unit.sparse_kernels import Interpreted
from tests.unit.test_sparse_recurrence import WIDTH, by_module, by_op

SMALL = replace(DEVICES["sm_90"], multiprocessors=3)
LIMITS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Of 16 bits a state, or a gate's gradient, is rounded at every step, relative 2^-11 or 2^-8."""


@pytest.fixture
def interpreted(tmp_path: Path) -> Iterator[tuple[Kernels, Interpreted]]:
    run = Interpreted(tmp_path)
    with launching(run, SMALL) as kernels:
        yield kernels, run


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


def compare(name: str, hidden: int, batch: int, steps: int, dtype: torch.dtype, both: bool) -> None:
    """Outputs, last states and the gradients of everything; the module computes in float64."""
    torch.manual_seed(0)
    module = module_of(name, hidden, bidirectional=both)
    for key, value in module.named_parameters():
        if key.startswith("weight_hh"):
            sparse(value)
    module.to(dtype)
    directions = 2 if both else 1
    x = torch.randn(steps, batch, WIDTH, dtype=dtype)
    h = 0.5 * torch.randn(directions, batch, hidden, dtype=dtype)
    c = torch.randn(directions, batch, hidden, dtype=dtype)
    inputs = [x, h, c] if name == "lstm" else [x, h]
    results: list[list[Tensor]] = []
    for run, kind in ((by_op, dtype), (by_module, torch.float64)):
        own = module_of(name, hidden, bidirectional=both).to(kind)
        own.load_state_dict(module.state_dict())
        given: Any = [t.to(kind).requires_grad_() for t in inputs]
        padded = given if name == "lstm" else [*given, None]
        args = (own, name, *padded) if run is by_op else (own, *padded)
        outs = run(*args)  # type: ignore[operator]
        torch.manual_seed(2)
        loss = sum((out * torch.randn(out.shape).to(kind)).sum() for out in outs)
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, [*given, *own.parameters()])
        results.append([*(out.detach() for out in outs), *grads])
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == dtype
        limit = LIMITS[dtype] * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found.double(), wanted, atol=limit, rtol=0)


@pytest.mark.parametrize("name", sorted(CELLS))
@pytest.mark.parametrize(
    ("hidden", "batch", "steps", "dtype", "both"),
    [
        (33, 3, 2, torch.float32, False),
        (64, 1, 5, torch.bfloat16, False),
        (33, 5, 1, torch.float16, False),
        (33, 9, 2, torch.bfloat16, True),
    ],
    ids=["fp32", "one column", "one step", "slices, both directions"],
)
def test_equals_the_module(
    name: str,
    hidden: int,
    batch: int,
    steps: int,
    dtype: torch.dtype,
    both: bool,
    interpreted: tuple[Kernels, Interpreted],
) -> None:
    compare(name, hidden, batch, steps, dtype, both)
    kernels, run = interpreted
    directions = 2 if both else 1
    slices = directions * (2 if batch > 8 else 1)
    assert run.launches["forward"] == slices
    assert run.launches["backward"] >= slices
    assert len(kernels) == 2 * directions
    assert {TYPES[spec.value] for spec in run.specs} == {dtype}
