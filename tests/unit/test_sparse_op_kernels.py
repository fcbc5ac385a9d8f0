"""The op sparse_rnn by the fast kernels, interpreted, against the unmodified modules."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar
from graphpar.codegen.sparse_rnn import kernels as kernels_module
from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.exchange import TYPES
from graphpar.codegen.sparse_rnn.interpreted import InterpretedLauncher
from graphpar.codegen.sparse_rnn.kernels import Kernels
from graphpar.codegen.sparse_rnn.owners import Owner
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from tests.unit.sparse_op import (
    HIDDEN,
    LIMITS,
    RELATIVE,
    by_products,
    cell_run,
    library,
    matrix,
    module_of,
    sparse,
)
from tests.unit.test_sparse_recurrence import WIDTH, by_module, by_op


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
        outs = run(*args)
        torch.manual_seed(2)
        loss = sum((out * torch.randn(out.shape).to(kind)).sum() for out in outs)
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, [*given, *own.parameters()])
        results.append([*(out.detach() for out in outs), *grads])
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == dtype
        limit = LIMITS[dtype] * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found.double(), wanted, atol=limit, rtol=0)
        assert (found - wanted).norm() < RELATIVE[dtype] * wanted.norm()


@pytest.mark.parametrize("name", sorted(CELLS))
@pytest.mark.parametrize(
    ("hidden", "batch", "steps", "dtype", "both"),
    [
        (33, 3, 2, torch.float32, False),
        (64, 1, 5, torch.bfloat16, False),
        (33, 9, 1, torch.bfloat16, False),
        (33, 2, 2, torch.float16, True),
    ],
    ids=["fp32", "one column", "slices, one step", "both directions"],
)
def test_equals_the_module(
    name: str,
    hidden: int,
    batch: int,
    steps: int,
    dtype: torch.dtype,
    both: bool,
    interpreted: tuple[Kernels, InterpretedLauncher],
) -> None:
    compare(name, hidden, batch, steps, dtype, both)
    kernels, run = interpreted
    directions = 2 if both else 1
    slices = directions * (2 if batch > 8 else 1)
    assert run.launches["forward"] == slices
    assert run.launches["backward"] >= slices
    assert len(kernels) == 2 * directions
    assert {TYPES[spec.value] for spec in run.specs} == {dtype}


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_no_and_all_weights(
    density: float, interpreted: tuple[Kernels, InterpretedLauncher]
) -> None:
    weight = (density * torch.randn(3 * HIDDEN, HIDDEN)).requires_grad_()
    (found,) = torch.autograd.grad(cell_run(weight, cell="gru").square().sum(), weight)
    with library():
        (wanted,) = torch.autograd.grad(cell_run(weight, cell="gru").square().sum(), weight)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert interpreted[1].launches == {"forward": 1, "backward": 1}


def test_no_grad_inference_and_autocast(interpreted: tuple[Kernels, InterpretedLauncher]) -> None:
    _, run = interpreted
    weight = matrix(gates=4)
    wanted = by_products(weight, cell="lstm")
    with torch.no_grad():
        torch.testing.assert_close(cell_run(weight, cell="lstm"), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(cell_run(weight, cell="lstm"), wanted)
        torch.testing.assert_close(cell_run(weight.clone(), cell="lstm"), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(cell_run(weight, cell="lstm"), wanted)
    assert run.launches["forward"] == 4
    assert not any(spec.save for spec in run.specs)


@pytest.mark.parametrize("cell", ["rnn_tanh", "gru"])
def test_results_are_as_declared(
    cell: str, interpreted: tuple[Kernels, InterpretedLauncher]
) -> None:
    """In shapes and types, and none is another's memory: compilers rely on it."""
    gates = CELLS[cell].gates
    weight, h = matrix(gates=gates), torch.rand(1, HIDDEN)
    x = torch.randn(1, 1, gates * HIDDEN)
    ops, checks = torch.ops.graphpar_rnn, ("test_schema", "test_faketensor")
    given = (x, weight, None, None, h, None, cell, False)
    torch.library.opcheck(ops.recurrence.default, (*given, True), test_utils=checks)
    out, _, saved = ops.recurrence.default(*given, True)
    back = (torch.ones_like(out), None, out, saved, weight, None, h, None, cell, False)
    torch.library.opcheck(ops.recurrence_backward.default, back, test_utils=checks)
    results = ops.recurrence_backward.default(*back)
    memory = [t.untyped_storage().data_ptr() for t in results if t.numel()]
    assert len(set(memory)) == len(memory) == (3 if cell == "gru" else 2)
    assert interpreted[1].launches.keys() == {"forward", "backward"}


def test_compiled(interpreted: tuple[Kernels, InterpretedLauncher]) -> None:
    _, run = interpreted
    weight = matrix().requires_grad_()
    gates, h = torch.randn(2, 1, HIDDEN), torch.rand(1, HIDDEN)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(weight: Tensor) -> Tensor:
        return sparse_rnn(gates, weight * 2, None, None, h, None, "rnn_tanh")[0] + 1

    (found,) = torch.autograd.grad(compiled(weight).square().sum(), weight)
    with library():
        (wanted,) = torch.autograd.grad(compiled(weight).square().sum(), weight)
    torch.testing.assert_close(found, wanted)
    assert run.launches == {"forward": 1, "backward": 1}


def test_a_pruned_language_model_trains_by_kernels(
    interpreted: tuple[Kernels, InterpretedLauncher],
) -> None:
    """``transform`` of the unmodified model; its loss is that of the mask times dense products."""

    class Speller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, HIDDEN)
            self.lstm = nn.LSTM(HIDDEN, HIDDEN, bidirectional=True)
            self.head = nn.Linear(2 * HIDDEN, 16)

        def forward(self, text: Tensor) -> Tensor:
            states, _ = self.lstm(self.embed(text[:-1]))
            return nn.functional.cross_entropy(self.head(states).flatten(0, 1), text[1:].flatten())

    kernels, run = interpreted
    torch.manual_seed(0)
    text = torch.randint(16, (3, 2))
    losses: list[list[float]] = []
    for by_kernels in (True, False):
        torch.manual_seed(1)
        model: nn.Module = Speller()
        for name, _ in list(model.named_parameters()):
            if "weight_hh" in name:
                prune.l1_unstructured(model.lstm, name.removeprefix("lstm."), 0.8)
        if by_kernels:
            model = graphpar.transform(model, (text,), tp=1, sparse_rnn=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        found = []
        for _ in range(3):
            loss = model(text)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        losses.append(found)
    assert run.launches == {"forward": 6, "backward": 6}
    assert len(kernels) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]


def test_parameters_of_a_transformed_model_are_known_again(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program reads views of them, new ones each time: no call waits while they stand."""
    kernels, run = interpreted
    monkeypatch.setattr(kernels_module, "_answers_late", lambda device: True)
    trusted: list[bool] = []
    stands = Owner.stands

    def noted(self: Owner, x: Tensor) -> bool:
        trusted.append(stands(self, x))
        return trusted[-1]

    monkeypatch.setattr(Owner, "stands", noted)
    torch.manual_seed(0)
    model, x = module_of("lstm", HIDDEN), torch.randn(1, 1, WIDTH)
    sparse(model.weight_hh_l0)
    parallel = graphpar.transform(model, (x,), tp=1, sparse_rnn=True)
    for _ in range(2):
        for each in (model, parallel):
            each(x)[0].sum().backward()
    assert trusted == [True, True]
    assert run.launches == {"forward": 2, "backward": 2}
    with torch.no_grad():
        for each in (model, parallel):
            for parameter in each.parameters():
                parameter.mul_(1.5)
    torch.testing.assert_close(parallel(x)[0], model(x)[0], atol=1e-5, rtol=1e-5)
    assert trusted == [True, True, False]
    del parallel, each, parameter
    gc.collect()
    cell_run(matrix())
    assert len(kernels) == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", sorted(CELLS))
def test_many_sizes(name: str, seed: int, interpreted: tuple[Kernels, InterpretedLauncher]) -> None:
    compare(
        name,
        hidden=(33, 64, 20)[seed % 3],
        batch=(1, 3, 5, 9)[seed % 4],
        steps=(1, 2, 5)[seed // 2 % 3],
        dtype=tuple(LIMITS)[seed // 4 % 3],
        both=bool(seed % 2),
    )
    assert interpreted[1].launches.keys() == {"forward", "backward"}
