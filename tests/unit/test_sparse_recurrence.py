"""The op sparse_rnn, off a GPU, against the unmodified modules in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.pattern import Patterns
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from graphpar.errors import GraphparError, InputError

NAMES = sorted(CELLS)
WIDTH = 7


def module_of(name: str, hidden: int, *, bidirectional: bool = False, projection: int = 0) -> Any:
    options: dict[str, Any] = {"bidirectional": bidirectional, "dtype": torch.float64}
    if name == "lstm":
        return nn.LSTM(WIDTH, hidden, proj_size=projection, **options)
    if name == "gru":
        return nn.GRU(WIDTH, hidden, **options)
    return nn.RNN(WIDTH, hidden, nonlinearity=name.removeprefix("rnn_"), **options)


def zero_some(weight: Tensor, density: float) -> None:
    """Zeros at random, one row empty, one full."""
    with torch.no_grad():
        weight.mul_(torch.rand_like(weight) < density)
        weight[0], weight[-1] = 0, 0.1


def by_op(module: Any, name: str, x: Tensor, h: Tensor, c: Tensor | None) -> list[Tensor]:
    """What the module gives, by the op: output, last h and last c of each direction."""
    outs, hs, cs = [], [], []
    for place in range(2 if module.bidirectional else 1):
        end = "l0_reverse" if place else "l0"
        own = {
            part: getattr(module, f"{part}_{end}", None)
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        }
        gates = nn.functional.linear(x, own["weight_ih"], own["bias_ih"])  # type: ignore[arg-type]
        out, last, last_c = sparse_rnn(
            gates,
            own["weight_hh"],  # type: ignore[arg-type]
            own["bias_hh"],
            own["weight_hr"],
            h[place],
            None if c is None else c[place],
            name,
            reverse=bool(place),
        )
        outs.append(out)
        hs.append(last)
        cs.append(last_c)
    found = [torch.cat(outs, -1), torch.stack(hs)]
    return found if c is None else [*found, torch.stack(cs)]


def by_module(module: Any, x: Tensor, h: Tensor, c: Tensor | None) -> list[Tensor]:
    if c is None:
        return list(module(x, h))
    out, (last, last_c) = module(x, (h, c))
    return [out, last, last_c]


def compare(
    module: Any, name: str, steps: int, batch: int, *, uses: Sequence[int] = (0, 1, 2)
) -> None:
    """Outputs, and gradients of everything from random cotangents of the outputs ``uses``."""
    torch.manual_seed(1)
    directions = 2 if module.bidirectional else 1
    state = getattr(module, "proj_size", 0) or module.hidden_size
    x = torch.randn(steps, batch, WIDTH, dtype=torch.float64)
    h = torch.randn(directions, batch, state, dtype=torch.float64)
    c = torch.randn(directions, batch, module.hidden_size, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in ([x, h, c] if name == "lstm" else [x, h])]
    sources = [*inputs, *module.parameters()]
    results = []
    for run in (
        lambda *given: by_module(module, *given),
        lambda *given: by_op(module, name, *given),
    ):
        given = [*inputs, None] if name != "lstm" else inputs
        outs: list[Tensor] = run(*given)  # type: ignore[no-untyped-call]
        torch.manual_seed(2)
        loss = sum((out * torch.randn_like(out)).sum() for i, out in enumerate(outs) if i in uses)
        assert isinstance(loss, Tensor)
        results.append([*outs, *torch.autograd.grad(loss, sources, materialize_grads=True)])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-10)


# --- sizes and forms (C81, C82), with an empty and a full row ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("hidden", "batch", "steps"), [(33, 1, 9), (64, 3, 2), (257, 5, 1), (33, 5, 9)]
)
def test_equals_the_module(name: str, hidden: int, batch: int, steps: int) -> None:
    torch.manual_seed(0)
    module = module_of(name, hidden)
    zero_some(module.weight_hh_l0, 0.2)
    compare(module, name, steps, batch)


@pytest.mark.parametrize("name", NAMES)
def test_both_directions(name: str) -> None:
    torch.manual_seed(0)
    module = module_of(name, 33, bidirectional=True)
    zero_some(module.weight_hh_l0, 0.2)
    zero_some(module.weight_hh_l0_reverse, 0.1)
    compare(module, name, 5, 3)


def test_projections() -> None:
    torch.manual_seed(0)
    module = module_of("lstm", 33, projection=12, bidirectional=True)
    zero_some(module.weight_hh_l0, 0.2)
    compare(module, "lstm", 5, 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_no_and_all_weights(name: str, density: float) -> None:
    torch.manual_seed(0)
    module = module_of(name, 33)
    with torch.no_grad():
        module.weight_hh_l0.mul_(density)
    compare(module, name, 3, 2)


@pytest.mark.parametrize("uses", [(0,), (1,), (2,)])
def test_some_outputs_unused(uses: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = module_of("lstm", 33)
    compare(module, "lstm", 3, 2, uses=uses)


def pruned(amount: float = 0.8) -> Any:
    torch.manual_seed(0)
    module = module_of("gru", 33)
    prune.l1_unstructured(module, "weight_hh_l0", amount)
    return module


def gru(module: Any, weight: Tensor) -> Tensor:
    """The module's output with ``weight`` as recurrent matrix, by the op."""
    torch.manual_seed(1)
    gates = nn.functional.linear(
        torch.randn(4, 2, WIDTH, dtype=torch.float64), module.weight_ih_l0, module.bias_ih_l0
    )
    h = torch.zeros(2, 33, dtype=torch.float64)
    return sparse_rnn(gates, weight, module.bias_hh_l0, None, h, None, "gru")[0]


def functional(module: Any, weight: Tensor) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(4, 2, WIDTH, dtype=torch.float64)
    own = (module.weight_ih_l0, weight, module.bias_ih_l0, module.bias_hh_l0)
    zero = torch.zeros(1, 2, 33, dtype=torch.float64)
    found: Tensor = torch.gru(x, zero, own, True, 1, 0.0, True, False, False)[0]
    return found


def test_a_mask_masks_the_gradient() -> None:
    module = pruned()
    weight, mask = module.weight_hh_l0_orig, module.weight_hh_l0_mask
    found, wanted = (
        torch.autograd.grad(run(module, weight * mask).square().sum(), weight)[0]
        for run in (gru, functional)
    )
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    assert not found[mask == 0].any()


def test_zeros_of_a_plain_weight_have_gradients() -> None:
    module = pruned()
    prune.remove(module, "weight_hh_l0")
    weight = module.weight_hh_l0
    found, wanted = (
        torch.autograd.grad(run(module, weight).square().sum(), weight)[0]
        for run in (gru, functional)
    )
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    assert found[weight == 0].all()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(2),  # values change, the pattern stands
        lambda w: w.data.mul_(2),  # past autograd's counter of versions
        lambda w: w.data.flatten().__setitem__(7, 5.0),  # one more non-zero
        lambda w: w.add_(0.1),  # dense
        lambda w: w.zero_(),
    ],
)
def test_weights_that_change(change: Callable[[Tensor], Any]) -> None:
    module = pruned()
    weight = module.weight_hh_l0.detach().clone()
    weight.flatten()[7] = 0
    for _ in range(2):
        torch.testing.assert_close(gru(module, weight), functional(module, weight))
        change(weight)
        torch.testing.assert_close(gru(module, weight), functional(module, weight))


def test_patterns_are_remembered() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(40, 40) * (torch.rand(40, 40) < 0.1) for _ in range(3)]
    patterns = Patterns(2)
    first, _ = patterns.of(weights[0])
    again, values = patterns.of(weights[0] * 2)
    assert again is first
    assert torch.equal(values, (weights[0] * 2)[weights[0] != 0])
    for weight in weights[1:]:
        patterns.of(weight)
    assert patterns.of(weights[0])[0] is not first  # two others came since


def test_a_non_zero_between_the_probes_is_seen() -> None:
    weight = torch.zeros(100, 100)
    weight[0, 0] = 1
    patterns = Patterns()
    first, _ = patterns.of(weight)
    weight[0, 5] = 1
    grown, values = patterns.of(weight)
    assert grown is not first
    assert torch.equal(grown.matrix(values).to_dense(), weight)
    assert torch.equal(grown.transpose(values).to_dense(), weight.t())


def arguments(dtype: torch.dtype = torch.float64, name: str = "lstm") -> tuple[Any, ...]:
    torch.manual_seed(0)
    count = CELLS[name].gates
    weight = torch.randn(count * 6, 6, dtype=dtype) * (torch.rand(count * 6, 6) < 0.4)
    bias = torch.randn(count * 6, dtype=dtype)
    gates = torch.randn(3, 2, count * 6, dtype=dtype)
    h, c = torch.randn(2, 6, dtype=dtype), torch.randn(2, 6, dtype=dtype)
    return gates, weight, bias, None, h, c if name == "lstm" else None, name, False


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_the_op_keeps_torchs_rules(name: str) -> None:
    args = [a.requires_grad_() if isinstance(a, Tensor) else a for a in arguments(name=name)]
    torch.library.opcheck(
        torch.ops.graphpar_rnn.recurrence.default,
        (*args, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    args = arguments(torch.float64)
    cast: Any = [a.to(dtype).requires_grad_() if isinstance(a, Tensor) else a for a in args]
    wide: Any = [a.detach().double().requires_grad_() if isinstance(a, Tensor) else a for a in cast]
    limit = 2e-2 if dtype.itemsize == 2 else 1e-5
    found, wanted = (sparse_rnn(*each) for each in (cast, wide))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=limit, rtol=limit)
    for out in (found, wanted):
        out[0].sum().backward()
    torch.testing.assert_close(cast[1].grad.double(), wide[1].grad, atol=limit, rtol=limit)


def test_no_second_derivatives() -> None:
    args: Any = [a.requires_grad_() if isinstance(a, Tensor) else a for a in arguments()]
    (grad,) = torch.autograd.grad(sparse_rnn(*args)[0].sum(), args[1], create_graph=True)
    with pytest.raises(GraphparError, match="no second derivative"):
        grad.sum().backward()


def test_nothing_is_saved_without_gradients() -> None:
    args = arguments()
    out = torch.ops.graphpar_rnn.recurrence.default(*args, False)
    assert out[2].numel() == 0
    with torch.inference_mode():
        torch.testing.assert_close(sparse_rnn(*args)[0], out[0])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(3, 2, 25), "takes gates"),
        (1, torch.zeros(24, 5), "weight has shape"),
        (2, torch.zeros(5), "bias has shape"),
        (4, torch.zeros(3, 6), "h has shape"),
        (4, torch.zeros(2, 6), "h has type torch.float32"),
        (5, None, "has a cell state"),
        (6, "gru", "takes gates|has a cell state|weight has shape"),
        (6, "elman", "no cell is named 'elman'; known: lstm, gru, rnn_tanh, rnn_relu"),
    ],
)
def test_bad_arguments(place: int, value: Any, message: str) -> None:
    args = list(arguments())
    args[place] = value
    with pytest.raises(InputError, match=message):
        sparse_rnn(*args)
