"""The op on a GPU: what is the library's, and what a kernel that fails gives."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn import kernels as kernels_module
from graphpar.codegen.sparse_rnn.exchange import TYPES, Exchange
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.fast_part import FastPart
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.interpreted import InterpretedLauncher
from graphpar.codegen.sparse_rnn.kernels import Kernels, launching
from graphpar.codegen.sparse_rnn.launch import check_device
from graphpar.codegen.sparse_rnn.limits import Value
from graphpar.codegen.sparse_rnn.owners import Owner
from graphpar.codegen.sparse_rnn.plan import Shape
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from graphpar.errors import (
    CapacityError,
    GraphparWarning,
    UnsupportedError,
    WatchdogError,
)
from tests.unit.sparse_op import (
    HIDDEN,
    SMALL,
    by_products,
    cell_run,
    library,
    matrix,
)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("float64", "a kernel takes torch.bfloat16, torch.float16, torch.float32, not"),
        ("projection", "a kernel has no projections"),
        ("capacity", "does not fit on H200"),
        ("not finite", "values that are not finite"),
        ("old", "triton 3.5: the fast kernels need 3.6"),
    ],
)
def test_what_is_the_librarys(case: str, reason: str, tmp_path: Path) -> None:
    """With one warning, and the same numbers."""
    weight, cell = matrix(gates=4), "lstm"
    device, run = SMALL, InterpretedLauncher(tmp_path)
    if case == "float64":
        weight = weight.double()
    if case == "not finite":
        weight[0, 0] = torch.inf
    if case == "capacity":
        device = replace(SMALL, shared_bytes=64)

    def launch(spec: FastSpec, programs: int, arguments: Any) -> None:
        if case == "old":
            check_device(programs, multiprocessors=132, capability=(9, 0), triton=(3, 5))
        run(spec, programs, arguments)

    def call(strict: bool = False) -> Tensor:
        gates = torch.ones(2, 1, len(weight), dtype=weight.dtype)
        h, c = (torch.ones(1, HIDDEN, dtype=weight.dtype) for _ in range(2))
        projection = torch.eye(HIDDEN) if case == "projection" else None
        return sparse_rnn(gates, weight, None, projection, h, c, cell, False, strict)[0]

    wanted = call()
    with launching(launch, device), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(call(), wanted, equal_nan=True)
        if case in ("capacity", "old"):
            for _ in range(2):
                with pytest.raises((CapacityError, UnsupportedError), match=reason):
                    call(strict=True)
        else:
            torch.testing.assert_close(call(strict=True), wanted, equal_nan=True)
    (message,) = [str(each.message) for each in told]
    assert reason in message
    assert all(each.category is GraphparWarning for each in told)
    assert not run.launches


def test_backward_alone_may_be_the_librarys(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(weight: Tensor, cell: str, part: str, **options: Any) -> Any:
        if part == "backward":
            raise CapacityError("the gradients of gates do not fit")
        return plan_of(weight, cell, "forward", **options)

    monkeypatch.setattr(kernels_module, "plan_of", refuse)
    weight = matrix(gates=3).requires_grad_()
    with pytest.warns(GraphparWarning, match="the backward of gru .* do not fit"):
        (grad,) = torch.autograd.grad(cell_run(weight, cell="gru").square().sum(), weight)
    with library():
        (wanted,) = torch.autograd.grad(cell_run(weight, cell="gru").square().sum(), weight)
    torch.testing.assert_close(grad, wanted)
    assert interpreted[1].launches == {"forward": 1}


def test_a_kernel_that_the_machine_refuses_is_not_tried_again_and_again(tmp_path: Path) -> None:
    """Of a batch that comes later, say; what is known of its kind goes."""
    run, tried = InterpretedLauncher(tmp_path), []

    def launch(spec: FastSpec, programs: int, arguments: Any) -> None:
        tried.append(spec.batch)
        if spec.batch == 4:
            raise UnsupportedError("too many registers")
        run(spec, programs, arguments)

    weight = matrix()
    with launching(launch, SMALL) as kernels:
        cell_run(weight, batch=3)
        with pytest.warns(GraphparWarning, match="too many registers"):
            cell_run(weight, batch=4)
        for _ in range(5):
            torch.testing.assert_close(cell_run(weight, batch=4), by_products(weight, batch=4))
        assert len(kernels) == 0
    assert tried == [3, 4]


def test_a_refusal_keeps_no_tensors(tmp_path: Path) -> None:
    small = replace(SMALL, shared_bytes=64)
    weight = matrix()
    with launching(InterpretedLauncher(tmp_path), small):
        with pytest.warns(GraphparWarning, match="does not fit"):
            cell_run(weight)
        owner = Owner.of(weight)
        assert not owner.gone()
        del weight
        assert owner.gone()


def test_sequences_beyond_32_bits_are_the_librarys(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of eight units; an LSTM saves five values of each."""
    weight = matrix(gates=4)
    monkeypatch.setattr(kernels_module, "_MOST_ELEMENTS", 2 * 5 * HIDDEN)
    cell_run(weight, cell="lstm")
    monkeypatch.setattr(kernels_module, "_MOST_ELEMENTS", 2 * 5 * HIDDEN - 1)
    with pytest.warns(GraphparWarning, match="2 steps: a kernel counts elements in 32 bits"):
        torch.testing.assert_close(cell_run(weight, cell="lstm"), by_products(weight, cell="lstm"))
    assert interpreted[1].launches == {"forward": 1}


def test_a_watchdog_that_is_told_of_late(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose flag comes to the host behind the launch."""
    weight = matrix()
    cell_run(weight)
    (exchange,) = (
        e for kept in interpreted[0]._kept.values() for e in kept.entries[0].part.exchanges.values()
    )
    monkeypatch.setattr(Exchange, "ask", lambda self: self._told.copy_(self.error))
    exchange.error.fill_(1)
    assert cell_run(weight).isnan().all()
    with pytest.raises(WatchdogError, match="results of this recurrence were NaN"):
        cell_run(weight)
    torch.testing.assert_close(cell_run(weight), by_products(weight))


def test_a_watchdog_is_an_error_and_its_results_nan(tmp_path: Path) -> None:
    results = []

    def broken(spec: FastSpec, programs: int, arguments: Any) -> None:
        arguments["out_ptr"].fill_(1.0)
        arguments["error_ptr"].fill_(1)
        results.append(arguments["out_ptr"])

    with launching(broken, SMALL):
        for _ in range(2):
            with pytest.raises(WatchdogError, match="waited in vain"):
                cell_run(matrix())
    assert all(each.isnan().all() for each in results)
    assert len(results) == 2


@pytest.mark.parametrize("value", TYPES)
@pytest.mark.parametrize("column", [0, 1])
def test_states_that_are_no_numbers_spread(column: int, value: Value, tmp_path: Path) -> None:
    """Also the NaN that GPUs make, all of whose bits are set, which is not to be rounded to 0."""
    shape = Shape(warps=2)
    weight = torch.ones(HIDDEN, HIDDEN)
    run = InterpretedLauncher(tmp_path)
    part = FastPart(weight, "rnn_relu", "forward", launch=run, programs=2, shape=shape, value=value)
    gates = torch.zeros(2, 2, HIDDEN)
    gates[0, column, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    out, _, _ = part.forward(gates, None, torch.zeros(2, HIDDEN), None, save=False)
    assert out[1, column].isnan().all()
    assert float(out[:, 1 - column].abs().max()) < 1e-30
