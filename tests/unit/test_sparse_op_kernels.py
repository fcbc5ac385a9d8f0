"""The op sparse_rnn by the fast kernels, interpreted, against the unmodified modules."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar
from graphpar.codegen.sparse_rnn import exchange as exchange_module
from graphpar.codegen.sparse_rnn import fast_part
from graphpar.codegen.sparse_rnn import kernels as kernels_module
from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.exchange import TYPES, Exchange
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.fast_part import FastPart
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.interpreted import InterpretedLauncher
from graphpar.codegen.sparse_rnn.kernels import _ACTIVE, Kernels, launching
from graphpar.codegen.sparse_rnn.launch import check_device
from graphpar.codegen.sparse_rnn.limits import Value
from graphpar.codegen.sparse_rnn.owners import Owner
from graphpar.codegen.sparse_rnn.plan import Shape
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from graphpar.errors import (
    CapacityError,
    GraphparWarning,
    KernelError,
    UnsupportedError,
    WatchdogError,
)
from tests.unit.test_sparse_recurrence import WIDTH, by_module, by_op

SMALL = replace(DEVICES["sm_90"], multiprocessors=3)
LIMITS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Of 16 bits a state, or a gate's gradient, is rounded at every step, relative 2^-11 or 2^-8."""


@pytest.fixture
def interpreted(tmp_path: Path) -> Iterator[tuple[Kernels, InterpretedLauncher]]:
    run = InterpretedLauncher(tmp_path)
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


# --- training: values, patterns, owners ---

HIDDEN = 8


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


@contextmanager
def library() -> Iterator[None]:
    """No kernels within."""
    _ACTIVE.append(Kernels())
    try:
        yield
    finally:
        _ACTIVE.pop()


def matrix(seed: int = 0, density: float = 0.3, gates: int = 1, hidden: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = gates * hidden, hidden
    return torch.randn(shape, generator=generator) * (
        torch.rand(shape, generator=generator) < density
    )


@pytest.mark.parametrize("masked", [True, False])
def test_training_follows_the_module(
    masked: bool, interpreted: tuple[Kernels, InterpretedLauncher]
) -> None:
    """With a mask the pattern stands; zeros of a plain weight get gradients, and it grows."""
    kernels, run = interpreted
    losses: list[list[float]] = []
    for by_kernels in (True, False):
        torch.manual_seed(0)
        module: Any = nn.RNN(WIDTH, HIDDEN)
        prune.l1_unstructured(module, "weight_hh_l0", 0.7)
        if not masked:
            prune.remove(module, "weight_hh_l0")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        x = torch.randn(2, 1, WIDTH)
        found = []
        for _ in range(3):
            if by_kernels:
                weight: Any = module.weight_hh_l0
                if masked:
                    weight = module.weight_hh_l0_orig * module.weight_hh_l0_mask
                gates = nn.functional.linear(x, module.weight_ih_l0, module.bias_ih_l0)
                h = torch.zeros(1, HIDDEN)
                out = sparse_rnn(gates, weight, module.bias_hh_l0, None, h, None, "rnn_tanh")[0]
            else:
                out = functional(module, x)
            loss = (out - 1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if masked:
                grad, mask = module.weight_hh_l0_orig.grad, module.weight_hh_l0_mask
                assert grad is not None
                assert not grad[mask == 0].any()
            optimizer.step()
            found.append(float(loss.detach()))
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]
    assert run.launches["forward"] >= 3
    assert run.launches["backward"] >= 3
    assert len(kernels) == 2  # what grew took the place of what it was


def functional(module: Any, x: Tensor) -> Tensor:
    weight = module.weight_hh_l0
    if hasattr(module, "weight_hh_l0_orig"):
        weight = module.weight_hh_l0_orig * module.weight_hh_l0_mask
    own = module.weight_ih_l0, weight, module.bias_ih_l0, module.bias_hh_l0
    zero = torch.zeros(1, 1, HIDDEN)
    found: Tensor = torch.rnn_tanh(x, zero, own, True, 1, 0.0, True, False, False)[0]
    return found


@pytest.mark.parametrize(
    ("change", "packed"),
    [
        (lambda w: w.mul_(2), 1),
        (lambda w: w.data.mul_(2), 1),  # past autograd's counter of versions
        (lambda w: w.data.flatten().__setitem__(7, 5.0), 1),  # one more, in its place
        (lambda w: w.set_(w.clone().mul_(2)), 1),
        (lambda w: w.zero_(), 1),
    ],
    ids=["values", "data", "grown", "other memory", "zero"],
)
def test_weights_that_change(
    change: Callable[[Tensor], Any], packed: int, interpreted: tuple[Kernels, InterpretedLauncher]
) -> None:
    kernels, _ = interpreted
    weight = matrix()
    weight.flatten()[7] = 0
    for _ in range(2):
        torch.testing.assert_close(cell_run(weight), by_products(weight))
        with torch.no_grad():
            change(weight)
        torch.testing.assert_close(cell_run(weight), by_products(weight))
    assert len(kernels) == packed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_16_bits_that_change(
    dtype: torch.dtype, interpreted: tuple[Kernels, InterpretedLauncher]
) -> None:
    weight = matrix(gates=3).to(dtype).requires_grad_()
    outs, grads = [], []
    for _ in range(2):
        out = cell_run(weight, cell="gru")
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out.sum(), weight)[0])
        with library():
            out = cell_run(weight, cell="gru")
            (grad,) = torch.autograd.grad(out.sum(), weight)
        limits: Any = {"atol": LIMITS[dtype], "rtol": LIMITS[dtype]}
        torch.testing.assert_close(outs[-1], out, **limits)
        torch.testing.assert_close(grads[-1], grad, **limits)
        with torch.no_grad():
            weight *= -1
    for first, second in (outs, grads):
        assert float((first - second).abs().max()) > 0.1
    assert interpreted[1].launches == {"forward": 2, "backward": 2}


def test_a_trusted_weight_that_grew_is_nan_and_then_an_error(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU, whose answers come late, does where the version does not tell of a change."""
    weight = matrix()
    weight[0] = 0
    monkeypatch.setattr(kernels_module, "_answers_late", lambda device: True)
    torch.testing.assert_close(cell_run(weight), by_products(weight))
    weight.data.mul_(2)
    torch.testing.assert_close(cell_run(weight), by_products(weight))  # values are never stale
    weight.data[0, 0] = 1
    assert cell_run(weight).isnan().all()
    with pytest.raises(KernelError, match="past its version counter"):
        cell_run(weight)
    monkeypatch.undo()
    torch.testing.assert_close(cell_run(weight), by_products(weight))


def test_models_share_nothing(interpreted: tuple[Kernels, InterpretedLauncher]) -> None:
    """Weights of one shape and of other patterns, in turn; also masked, which are new each time."""
    kernels, run = interpreted
    weights = [matrix(seed) for seed in range(3)]
    for turn in range(3):
        for weight in weights:
            given = weight if turn == 0 else weight * (weight != 0)
            torch.testing.assert_close(cell_run(given), by_products(given))
    assert len(kernels) == 3
    # In the second turn what follows what is learnt; after that each guess is right.
    before = run.launches["forward"]
    for weight in weights:
        cell_run(weight.clone())
    assert run.launches["forward"] == before + 3


def test_one_weight_in_two_layers(interpreted: tuple[Kernels, InterpretedLauncher]) -> None:
    kernels, run = interpreted
    weight = matrix().requires_grad_()

    def gradient() -> Tensor:
        out = cell_run(weight, 0).square().sum() + cell_run(weight, 1).sum()
        return torch.autograd.grad(out, weight)[0]

    found = gradient()
    with library():
        torch.testing.assert_close(found, gradient())
    assert len(kernels) == 2
    assert run.launches == {"forward": 2, "backward": 2}


def test_patterns_go_with_their_weights(interpreted: tuple[Kernels, InterpretedLauncher]) -> None:
    kernels, _ = interpreted
    kept = matrix(1)
    for seed in range(2, 5):
        weight = matrix(seed)
        for _ in range(2):
            cell_run(weight)
        cell_run(kept)
        del weight
    cell_run(matrix(9))
    assert len(kernels) == 2
    torch.testing.assert_close(cell_run(kept), by_products(kept))
    kernels.clear()
    assert len(kernels) == 0


def test_patterns_that_change_each_time_are_the_librarys(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is drawn anew each time would be packed each time."""
    monkeypatch.setattr(kernels_module, "_FREE_PACKS", 2)
    kernels, _ = interpreted
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(8):
            weight = matrix(seed)
            torch.testing.assert_close(cell_run(weight), by_products(weight))
    (message,) = [str(each.message) for each in told]
    assert message.endswith("by the library's sparse products: its pattern changes often")
    assert len(kernels) == 3


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


# --- what no kernel runs ---


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("float64", "a kernel takes torch.bfloat16, torch.float16, torch.float32, not"),
        ("projection", "a kernel has no projections"),
        ("capacity", "does not fit on H200"),
        ("not finite", "values that are not finite"),
        ("old", "triton 3.6: the fast kernels need 3.7"),
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
            check_device(programs, multiprocessors=132, capability=(9, 0), triton=(3, 6))
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


def test_what_a_captured_call_may_do(
    interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither plans nor asks: it takes values anew, and NaN tells of what does not fit."""
    kernels, _ = interpreted
    weight = matrix()
    weight[0] = 0

    def capture(yes: bool) -> None:
        for module in (kernels_module, fast_part, exchange_module):
            monkeypatch.setattr(module, "capturing", lambda device: yes)

    capture(True)
    with pytest.raises(KernelError, match=r"no call of rnn_tanh .* call the model once before"):
        cell_run(weight, batch=3)
    capture(False)
    cell_run(weight, batch=3)
    capture(True)
    weight *= 2
    torch.testing.assert_close(cell_run(weight, batch=3), by_products(weight, batch=3))
    with pytest.raises(KernelError, match="no launch with 4 batch columns came before"):
        cell_run(weight, batch=4)
    with pytest.raises(KernelError, match=r"cannot be captured in a CUDA graph: .*float64"):
        cell_run(weight.double())
    weight[0, 0] = 1
    assert cell_run(weight, batch=3).isnan().all()
    capture(False)
    with pytest.raises(KernelError, match="non-zeros outside of the pattern"):
        kernels.check()
    torch.testing.assert_close(cell_run(weight, batch=3), by_products(weight, batch=3))
    kernels.check()
    assert len(kernels) == 1


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


# --- a model, end to end ---


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
