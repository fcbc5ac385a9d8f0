"""The op by kernels: weights that change and grow, whose patterns are kept between calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from graphpar.codegen.sparse_rnn import exchange as exchange_module
from graphpar.codegen.sparse_rnn import fast_part
from graphpar.codegen.sparse_rnn import kernels as kernels_module
from graphpar.codegen.sparse_rnn.interpreted import InterpretedLauncher
from graphpar.codegen.sparse_rnn.kernels import Kernels
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from graphpar.errors import (
    KernelError,
)
from tests.unit.sparse_op import (
    HIDDEN,
    LIMITS,
    by_products,
    cell_run,
    library,
    matrix,
)
from tests.unit.test_sparse_recurrence import WIDTH


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
    with pytest.raises(KernelError, match=r"no call of rnn_tanh .* call it once before"):
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


@pytest.mark.parametrize("calls", [1, 2])
def test_masked_weights_of_several_layers_are_captured(
    calls: int, interpreted: tuple[Kernels, InterpretedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are new tensors: which pattern is whose is known from the calls before."""
    weights = [matrix(seed) for seed in range(3)]
    for _ in range(calls):
        for weight in weights:
            cell_run(weight * 1)
    for module in (kernels_module, fast_part, exchange_module):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    for weight in weights:
        torch.testing.assert_close(cell_run(weight * 3), by_products(weight * 3))
    assert len(interpreted[0]) == 3
