"""lower_recurrences: what becomes sparse, why, and that the numbers stay."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar
from graphpar.codegen.sparse_rnn.decide import CpuModel, Decision
from graphpar.errors import InputError
from graphpar.interpret import model_state, run
from graphpar.passes.lower_recurrences import LowerRecurrences, lower_recurrences
from graphpar.program import Program
from graphpar.testing import assert_equivalent, rewrite
from graphpar.trace import trace
from graphpar.verify import verify

SPARSE = "graphpar_rnn::sparse_rnn"
WIDTH, HIDDEN = 6, 33


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Net(nn.Module):
    """A recurrence between two products; ``states``: it returns the last states too."""

    def __init__(
        self, kind: str, *, states: bool = False, given: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.states, self.given = states, given
        self.up = nn.Linear(4, WIDTH)
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)
        if cell is nn.RNN:
            options["nonlinearity"] = kind
        self.rnn: Any = cell(WIDTH, HIDDEN, **options)
        out = (self.rnn.proj_size or HIDDEN) * (2 if self.rnn.bidirectional else 1)
        self.down = nn.Linear(out, 4)
        zeros = [n for n, _ in self.rnn.named_parameters() if n.startswith("weight_hh")]
        with torch.no_grad():
            for name in zeros:
                weight = getattr(self.rnn, name)
                weight *= torch.rand_like(weight) < 0.2
                weight[1], weight[2] = 0, 0.1

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.up(x))
        state = None
        if self.given:
            count = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
            batch = () if x.dim() == 2 else (x.shape[0 if self.rnn.batch_first else 1],)
            h = x.sum() * torch.ones(count, *batch, self.rnn.proj_size or HIDDEN) / 9
            c = x.mean() * torch.ones(count, *batch, HIDDEN)
            state = (h, c) if isinstance(self.rnn, nn.LSTM) else h
        y, last = self.rnn(x, state)
        out = self.down(y)
        return (out, last) if self.states else out


def net(kind: str, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(kind, **options)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def counts(program: Program) -> Counter[str]:
    nodes = [n for _, graph in program.graphs() for n in graph.nodes]
    return Counter(n.target._schema.name for n in nodes if hasattr(n.target, "_schema"))


def lowered(module: nn.Module, x: Tensor, **options: Any) -> Program:
    program = trace(module, (x,))
    found = lower_recurrences(program, LowerRecurrences(weights=model_state(module), **options))
    verify(found)
    return found


def decisions(program: Program) -> Mapping[str, Decision]:
    found: Mapping[str, Decision] = program.report["sparse_rnn"]
    return found


# --- forms (C82) ---

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers": {"num_layers": 2, "states": True},
    "both directions": {"bidirectional": True, "states": True, "num_layers": 2},
    "batch first": {"batch_first": True, "states": True},
    "no bias": {"bias": False},
    "given state": {"given": True, "states": True, "bidirectional": True},
    "dropout": {"num_layers": 3, "dropout": 0.4, "batch_first": True},
}


@pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh", "relu"])
def test_equals_the_original(kind: str, form: str) -> None:
    model, x = net(kind, **FORMS[form]), inputs(4, 2)
    found = assert_equivalent(model, (x,), tp=1, sparse_rnn=True)
    layers = FORMS[form].get("num_layers", 1) * (2 if FORMS[form].get("bidirectional") else 1)
    assert counts(found.program)[SPARSE] == layers
    assert not any(f"aten::{cell}" in counts(found.program) for cell in ("lstm", "gru"))
    if kind == "lstm" or form == "dropout":
        sp = form in ("batch first", "layers")
        assert_equivalent(model, (x,), tp=2, sp=sp, sparse_rnn=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
@pytest.mark.parametrize("form", ["plain", "both directions", "given state"])
def test_projections(form: str) -> None:
    model = net("lstm", proj_size=5, **FORMS[form])
    assert SPARSE in counts(
        assert_equivalent(model, (inputs(4, 2),), tp=2, sparse_rnn=True).program
    )


@pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_unbatched_and_one_step(kind: str) -> None:
    for shape in ((3,), (1, 1), (1, 5)):
        assert_equivalent(net(kind, states=True), (inputs(*shape),), tp=1, sparse_rnn=True)


def test_dropout_in_eval_is_none() -> None:
    model = net("lstm", num_layers=2, dropout=0.4).eval()
    found = assert_equivalent(model, (inputs(4, 2),), tp=1, sparse_rnn=True).program
    assert "aten::dropout" not in counts(found)


def test_masks_of_dropout_between_layers_are_invariant() -> None:
    """Which they are not inside of ``aten.lstm``: there, ranks draw them whole."""
    model = net("gru", num_layers=2, dropout=0.5)
    found = rewrite(model, (inputs(4, 2),), tp=1, rng="invariant", sparse_rnn=True)
    assert counts(found)["graphpar::seeded_dropout"] == 1


# --- pruning (C80) ---


@pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_pruned(kind: str, removed: bool) -> None:
    model, x = net(kind), inputs(4, 2)
    prune.l1_unstructured(model.rnn, "weight_hh_l0", 0.9)
    if removed:
        prune.remove(model.rnn, "weight_hh_l0")
    for tp in (1, 2) if kind == "gru" else (1,):
        found = assert_equivalent(model, (x,), tp=tp, sparse_rnn=True).program
        (decision,) = decisions(found).values()
        assert decision.density == pytest.approx(0.1, abs=0.01)
    parallel = graphpar.transform(model, (x,), tp=1, sparse_rnn=True)
    names = dict(model.named_parameters())
    assert dict(parallel.named_parameters()).keys() == names.keys()
    parallel(x).square().sum().backward()
    model(x).square().sum().backward()
    name = "rnn.weight_hh_l0" if removed else "rnn.weight_hh_l0_orig"
    found_grad, wanted = parallel.get_parameter(name).grad, names[name].grad
    torch.testing.assert_close(found_grad, wanted)
    assert wanted is not None
    weight = model.rnn.weight_hh_l0
    assert bool((wanted[weight == 0] != 0).any()) == removed


def test_pruned_again_after_flattened_weights_went_stale() -> None:
    model, x = net("gru"), inputs(4, 2)
    model(x)
    prune.random_unstructured(model.rnn, "weight_hh_l0", 0.5)
    model(x)
    prune.random_unstructured(model.rnn, "weight_hh_l0", 0.5)
    assert_equivalent(model, (x,), tp=1, sparse_rnn=True)


@pytest.mark.parametrize("removed", [False, True])
def test_training_follows_the_original(removed: bool) -> None:
    """Also where zeros become other values: the pattern grows."""
    model, x = net("lstm"), inputs(4, 2)
    prune.l1_unstructured(model.rnn, "weight_hh_l0", 0.8)
    if removed:
        prune.remove(model.rnn, "weight_hh_l0")
    parallel = graphpar.transform(model, (x,), tp=1, sparse_rnn=True)
    assert SPARSE in counts(parallel.program)
    losses: list[list[float]] = [[], []]
    for place, each in enumerate((model, parallel)):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.05)
        for _ in range(4):
            loss = each(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[place].append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < losses[0][0]


# --- decisions ---


def test_dense_recurrences_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 8)
    program = lowered(model, inputs(4, 2))
    assert counts(program)["aten::lstm"] == 1
    (decision,) = decisions(program).values()
    assert not decision.lowered
    assert decision.density == 1
    assert decision.reason.startswith("not faster: ")


def test_a_large_sparse_recurrence_is_lowered_by_default() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    model = nn.LSTM(8, 512)
    x = torch.randn(32, 1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "aten::lstm" in counts(graphpar.transform(model, (x,), tp=1).program)
    prune.l1_unstructured(model, "weight_hh_l0", 0.95)
    parallel = graphpar.transform(model, (x,), tp=1)
    assert SPARSE in counts(parallel.program)
    (decision,) = parallel.report["sparse_rnn"].values()
    assert decision.reason.startswith("faster: ")
    assert decision.speedup > 1.1
    torch.testing.assert_close(parallel(x), model(x))
    off = rewrite(model, (x,), tp=1, sparse_rnn=False)
    assert "aten::lstm" in counts(off)
    assert "sparse_rnn" not in off.report


BY_DENSITY = CpuModel(step_us=0, check_us=0, nonzero_us=1e-3)


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_layers_and_directions_are_decided_apart(kind: str) -> None:
    model, x = net(kind, num_layers=2, bidirectional=True, states=True, given=True), inputs(4, 2)
    with torch.no_grad():
        model.rnn.weight_hh_l0.fill_(0.01)
        model.rnn.weight_hh_l1_reverse.fill_(0.01)
    program = lowered(model, x, model=BY_DENSITY)
    assert {name: d.lowered for name, d in decisions(program).items()} == {
        "rnn layer 0": False,
        "rnn layer 0 reverse": True,
        "rnn layer 1": True,
        "rnn layer 1 reverse": False,
    }
    assert counts(program)[SPARSE] == 2
    found = run(program, model_state(model), [x])
    out, last = model(x)
    wanted = [out, *(last if isinstance(last, tuple) else [last])]
    sources = [x, *model.parameters()]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
        grads = [
            torch.autograd.grad(v.sum(), sources, retain_graph=True, materialize_grads=True)
            for v in (a, b)
        ]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)


def test_modules_called_twice_have_their_own_lines() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn: Any = nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Any:
            found: Tensor = self.rnn(self.rnn(x)[0])[0]
            return found

    torch.manual_seed(0)
    model, x = Twice(), inputs(3, 2)
    program = lowered(model, x, sparse_rnn=True)
    assert list(decisions(program)) == ["rnn layer 0", "rnn@1 layer 0"]
    assert_equivalent(model, (x,), tp=1, sparse_rnn=True)


def test_values_that_are_unknown() -> None:
    model, x = nn.GRU(4, 4, device="meta"), torch.randn(3, 2, 4, device="meta")
    (decision,) = decisions(lowered(model, x)).values()
    assert str(decision) == "dense: its recurrent weight has no values yet"
    assert decision.density is None
    assert counts(lowered(model, x, sparse_rnn=True))[SPARSE] == 1


def test_without_triton() -> None:
    """The recurrence runs by the library's products, as it does everywhere off a GPU."""
    code = """
import sys
sys.modules["triton"] = None
import torch, graphpar
from torch import nn
model, x = nn.LSTM(4, 8), torch.randn(3, 2, 4)
found = graphpar.transform(model, (x,), tp=1, sparse_rnn=True)
torch.testing.assert_close(found(x)[0], model(x)[0])
assert all(d.lowered for d in found.report["sparse_rnn"].values())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_values_that_are_not_finite() -> None:
    model: Any = nn.GRU(4, 4)
    with torch.no_grad():
        model.weight_hh_l0[0, 0] = torch.nan
    (decision,) = decisions(lowered(model, inputs(3, 2), sparse_rnn=True)).values()
    assert str(decision) == "dense: its recurrent weight has values that are not finite"


def test_a_program_without_recurrences_is_returned() -> None:
    program = trace(nn.Linear(4, 4), (inputs(3),))
    assert lower_recurrences(program) is program


def test_bad_modes() -> None:
    message = r"sparse_rnn must be one of True, False, 'auto', not 'always'"
    with pytest.raises(InputError, match=message):
        graphpar.transform(nn.GRU(4, 4), tp=1, sparse_rnn="always")
    with pytest.raises(InputError, match=message):
        lower_recurrences(
            trace(nn.Linear(4, 4), (inputs(3),)), LowerRecurrences(sparse_rnn="always")
        )


def test_other_calls() -> None:
    """Another call, evaluation, autocast: as the original, and sparse each time."""
    torch.set_default_dtype(torch.float32)
    model, x = net("lstm", num_layers=2), inputs(4, 2)
    parallel = graphpar.transform(model, (x,), tp=1, sparse_rnn=True)
    torch.testing.assert_close(parallel(inputs(5, 3)), model(inputs(5, 3)))
    torch.testing.assert_close(parallel.eval()(x), model.eval()(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = parallel(x), model(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert all(SPARSE in counts(v.program) for v in parallel._variants.values())
    assert len(parallel._variants) >= 3
