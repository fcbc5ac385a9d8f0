"""lower_recurrences: cells that are called step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar
from graphpar.passes.lower_recurrences import LowerRecurrences, lower_recurrences
from graphpar.program import Program
from graphpar.testing import assert_equivalent, compare, rewrite
from graphpar.trace import trace

SPARSE = torch.ops.graphpar_rnn.sparse_rnn.default
IN, HIDDEN = 6, 7
pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


CELLS: dict[str, Callable[..., Any]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": partial(nn.RNNCell, nonlinearity="relu"),
}


class Cells(nn.Module):
    """Layers of a cell over x [T, B, IN], one step after another.

    ``form``: "backward" goes from the last step to the first, "both" joins both ways, "given" has
    a first state that is computed, "dropout" drops between layers.
    """

    def __init__(self, kind: str, layers: int = 1, form: str = "", bias: bool = True) -> None:
        super().__init__()
        self.form, self.lstm = form, kind == "lstm"
        self.up = nn.Linear(IN, 2 * HIDDEN)
        sizes = [IN, *[HIDDEN] * (layers - 1)]
        self.cells = nn.ModuleList(CELLS[kind](size, HIDDEN, bias=bias) for size in sizes)
        if form == "both":
            self.back = CELLS[kind](IN, HIDDEN, bias=bias)

    def first(self, x: Tensor) -> Any:
        if self.form != "given":
            return None
        h, c = self.up(x.mean(0)).chunk(2, -1)
        return (h, c) if self.lstm else h

    def run(self, cell: Any, x: Tensor, times: Any) -> list[Tensor]:
        state, found = self.first(x), {}
        for t in times:
            state = cell(x[t], state)
            found[t] = state[0] if self.lstm else state
        return [found[t] for t in sorted(found)]

    def forward(self, x: Tensor) -> Any:
        times = range(len(x))
        if self.form == "backward":
            return torch.stack(self.run(self.cells[0], x, times[::-1]))
        if self.form == "both":
            ways = self.run(self.cells[0], x, times), self.run(self.back, x, times[::-1])
            return torch.stack([torch.cat(pair, -1) for pair in zip(*ways, strict=True)], 1)
        states, outs = [self.first(x)] * len(self.cells), []
        for t in times:
            y = x[t]
            for i, cell in enumerate(self.cells):
                states[i] = cell(y, states[i])
                y = states[i][0] if self.lstm else states[i]
                if self.form == "dropout" and i + 1 < len(self.cells):
                    y = F.dropout(y, 0.4, self.training)
            outs.append(y)
        return torch.stack(outs), states[-1]


def x_of(steps: int, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(steps, batch, IN, requires_grad=True)


def ops(program: Program) -> list[Any]:
    return [n.target for _, graph in program.graphs() for n in graph.nodes]


def rolled(model: nn.Module, x: Tensor, **options: Any) -> Program:
    """What is equal to the model, in numbers and gradients."""
    return assert_equivalent(model, (x,), **({"tp": 1, "sparse_rnn": True} | options)).program


def decisions(program: Program) -> dict[str, str]:
    return {name: str(each) for name, each in program.report["sparse_rnn"].items()}


@pytest.mark.parametrize(
    ("kind", "steps", "layers", "form", "bias"),
    [("lstm", 2, 1, "", True), ("gru", 2, 1, "", False), ("rnn_relu", 2, 2, "", True),
     ("lstm", 4, 1, "given", False), ("gru", 3, 1, "given", True),
     ("rnn_tanh", 3, 1, "given", True), ("lstm", 3, 1, "backward", True),
     ("gru", 3, 1, "both", True), ("lstm", 3, 2, "dropout", True)],
)  # fmt: skip
def test_equals_the_original(kind: str, steps: int, layers: int, form: str, bias: bool) -> None:
    torch.manual_seed(0)
    program = rolled(Cells(kind, layers, form, bias), x_of(steps))
    targets = ops(program)
    assert targets.count(SPARSE) == layers + (form == "both")
    # Nothing is left of the steps, and inputs and outputs are not taken apart.
    assert torch.ops.aten.tanh.default not in targets
    assert torch.ops.aten.addmm.default not in targets
    if form in ("", "backward", "given"):
        assert torch.ops.aten.stack.default not in targets
        assert targets.count(torch.ops.aten.linear.default) == layers + (form == "given")


@pytest.mark.parametrize(("kind", "sp"), [("lstm", True), ("gru", False)])
def test_on_two_ranks(kind: str, sp: bool) -> None:
    torch.manual_seed(0)
    assert SPARSE in ops(rolled(Cells(kind, 2), x_of(4), tp=2, sp=sp))


@pytest.mark.long
@pytest.mark.parametrize("form", ["", "backward", "both", "given"])
@pytest.mark.parametrize("kind", CELLS)
def test_every_length(kind: str, form: str) -> None:
    for steps in range(1, 10):
        for bias in (False, True):
            model = Cells(kind, 1, form, bias)
            found = ops(rolled(model, x_of(steps), tp=1 + steps % 2, sp=steps % 3 == 0))
            assert (SPARSE in found) == (steps > 1)


# --- loops over plain products ---


class Loop(nn.Module):
    """``tanh(x W + h U + b)`` and the like, written out; ``write`` is one step of it."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write
        gates = 4 if write.startswith("lstm") else 3 if write.startswith("gru") else 1
        self.W = nn.Parameter(torch.randn(IN, gates * HIDDEN))
        self.U = nn.Parameter(0.4 * torch.randn(HIDDEN, gates * HIDDEN))
        self.b = nn.Parameter(torch.randn(gates * HIDDEN))
        self.both = nn.Linear(IN + HIDDEN, gates * HIDDEN)
        self.gates = nn.ModuleList(nn.Linear(IN + HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], HIDDEN)
        c, outs = h, []
        for each in x.unbind(1):
            h, c = getattr(self, self.write)(each, h, c)
            outs.append(h)
        if self.write == "no_input":
            return torch.cat([h.unsqueeze(-1) for h in outs], 2), c
        return torch.cat([h[:, None] for h in outs], 1), torch.stack(outs, 2), c

    def tanh(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ self.W + h @ self.U + self.b), c

    def relu_scaled(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(self.b + (torch.mm(h, self.U) + x.mul(2) @ self.W)), c

    def no_input(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(h @ self.U + self.b), c

    def one_matrix(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.both(torch.cat((x, h), 1))), c

    def lstm_one_matrix(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        f, i, o, g = self.both(torch.cat((h, x[:, :IN]), 1)).view(-1, 4, HIDDEN).unbind(1)
        c = torch.addcmul(g.tanh() * i.sigmoid(), c, f.sigmoid())
        return c.tanh() * o.sigmoid(), c

    def lstm_linears(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((x, h), 1)
        i, f, g, o = (gate(both) for gate in self.gates)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def gru(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        r, z, n = (x @ self.W).split(HIDDEN, 1)
        hr, hz, hn = (h @ self.U + self.b).split(HIDDEN, 1)
        r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        return (1 - z) * torch.tanh(n + r * hn) + z * h, c

    def gru_lerp(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z, r, n = (x @ self.W + self.b).split(HIDDEN, 1)
        hn, hz, hr = (h @ self.U).split(HIDDEN, 1)
        n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        return torch.lerp(n, h, torch.sigmoid(z + hz)), c


@pytest.mark.parametrize(
    "write",
    ["tanh", "relu_scaled", "no_input", "one_matrix", "lstm_one_matrix", "lstm_linears", "gru",
     "gru_lerp"],
)  # fmt: skip
def test_steps_by_hand(write: str) -> None:
    torch.manual_seed(0)
    program = rolled(Loop(write), x_of(3, 4))
    assert ops(program).count(SPARSE) == 1
    assert torch.ops.aten.tanh.default not in ops(program)
    assert torch.ops.aten.unsqueeze.default not in ops(program)
    # Inputs that are computed at each step are stacked, outputs are there.
    assert ops(program).count(torch.ops.aten.stack.default) == (write == "relu_scaled")


# --- pruning ---


@pytest.mark.parametrize("outside", [False, True])
def test_pruned(outside: bool) -> None:
    """The mask multiplies the weight anew at every step, or the module holds zeros."""
    torch.manual_seed(0)
    model, x = Cells("gru"), x_of(3)
    cell: Any = model.cells[0]
    prune.l1_unstructured(cell, "weight_hh", 0.9)
    if outside:
        prune.remove(cell, "weight_hh")
    program = rolled(model, x)
    (decision,) = program.report["sparse_rnn"].values()
    assert decision.density == pytest.approx(0.1, abs=0.01)
    muls = ops(program).count(torch.ops.aten.mul.Tensor)
    assert muls == (0 if outside else 1)
    parallel = graphpar.transform(model, (x,), tp=1, sparse_rnn=True)
    for each in (parallel, model):
        out, last = each(x)
        (out.square().sum() + last.sum()).backward()
    name = "cells.0.weight_hh" if outside else "cells.0.weight_hh_orig"
    found, wanted = parallel.get_parameter(name).grad, model.get_parameter(name).grad
    torch.testing.assert_close(found, wanted)
    assert wanted is not None
    assert bool((wanted[cell.weight_hh == 0] != 0).any()) == outside


def test_a_large_sparse_loop_is_rolled_by_default() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(8, 512)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for each in x:
                state = self.cell(each, state)
            assert state is not None
            h: Tensor = state[0]
            return h

    model, x = Net(), torch.randn(8, 1, 8)
    dense = graphpar.transform(model, (x,), tp=1)
    assert SPARSE not in ops(dense.program)
    prune.l1_unstructured(model.cell, "weight_hh", 0.95)
    sparse = graphpar.transform(model, (x,), tp=1)
    ((name, decision),) = sparse.report["sparse_rnn"].items()
    assert name == "cell 8 steps"
    assert decision.reason.startswith("faster: ")
    torch.testing.assert_close(sparse(x), model(x))


# --- what stays ---


class Stays(nn.Module):
    """Loops that are no sequence of one cell; ``why`` picks one."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why
        self.cell = nn.LSTMCell(IN, HIDDEN)
        self.feed = nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Any:
        h = c = x.new_zeros(x.shape[1], HIDDEN)
        keep, outs = F.dropout(torch.ones_like(h), 0.3), []
        for t, each in enumerate(x):
            if self.why == "feeds":
                score = torch.softmax(torch.einsum("tbi,bi->tb", x, self.feed(h)), 0)
                each = each + torch.einsum("tb,tbi->bi", score, x)
            if self.why == "forms" and t:
                each = torch.cat((each[:, :2], each[:, 2:]), 1)
            before = c
            h, c = self.cell(each, (h, c))
            if self.why == "cell state":
                outs.append(c)
            if self.why == "changed":
                h = h * keep
            if self.why == "cell changed":
                c = 0.9 * c + 0.1 * before
            outs.append(h)
        return torch.stack(outs)


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("feeds", "the input of a step depends on a state before it: test_sparse_loops.py:"),
        ("cell state", "the cell state of a step is used outside: test_sparse_loops.py:"),
        ("changed", "its state is changed between steps: test_sparse_loops.py:"),
        ("cell changed", "its state is changed between steps: test_sparse_loops.py:"),
        ("forms", "its steps take inputs of different forms"),
    ],
)
def test_what_stays(why: str, reason: str) -> None:
    torch.manual_seed(0)
    program = rolled(Stays(why), x_of(3))
    assert SPARSE not in ops(program)
    ((name, decision),) = decisions(program).items()
    assert name == "cell 3 steps"
    assert decision.startswith(f"dense: {reason}")


def test_a_gate_that_is_returned() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.h = nn.Linear(IN, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)

        def forward(self, x: Tensor) -> Any:
            h = c = x.new_zeros(x.shape[1], HIDDEN)
            gates = []
            for each in x:
                i, f, g, o = (self.x(each) + self.h(h)).chunk(4, 1)
                forget = f.sigmoid()
                gates.append(forget)
                c = forget * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return h, torch.stack(gates)

    torch.manual_seed(0)
    ((_, decision),) = decisions(rolled(Net(), x_of(3))).items()
    assert decision.startswith("dense: a gate of a step is used outside: test_sparse_loops.py:")


def test_inputs_of_another_type() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], HIDDEN)
            for each in F.pad(x, (0, 1)).float():
                h = torch.tanh(each + self.h(h))
            return h

    torch.manual_seed(0)
    ((_, decision),) = decisions(rolled(Net(), x_of(3))).items()
    assert decision == "dense: its states, inputs and weights differ in type"


def test_masks_of_the_original_stay_in_order() -> None:
    """With two dropouts between three layers the second would be drawn after all of the first."""
    torch.manual_seed(0)
    model, x = Cells("rnn_tanh", 3, "dropout"), x_of(2)
    exact = rolled(model, x)
    assert ops(exact).count(SPARSE) == 2
    reasons = [d for d in decisions(exact).values() if d.startswith("dense")]
    assert reasons == ["dense: it would draw random numbers in another order"]
    free = lower_recurrences(trace(model, (x,)), LowerRecurrences(sparse_rnn=True))
    assert ops(free).count(SPARSE) == 3
    one, two = (rewrite(model, (x,), tp=n, rng="invariant", sparse_rnn=True) for n in (1, 2))
    assert ops(two).count(SPARSE) == 3
    compare(two, model, (x,), reference=one)


def test_layers_that_are_no_loop() -> None:
    """A step alone, and one block of a network with shared weights, are not."""
    torch.manual_seed(0)
    for model, x in (
        (Cells("lstm"), x_of(1)),
        (nn.Sequential(nn.Linear(IN, IN), nn.Tanh()), x_of(3)[0]),
    ):
        program = trace(model, (x,))
        assert lower_recurrences(program, LowerRecurrences(sparse_rnn=True)) is program


def test_a_state_that_two_loops_go_on_from() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(IN, HIDDEN)

        def forward(self, x: Tensor) -> Any:
            h = x.new_zeros(1, HIDDEN).expand(x.shape[1], HIDDEN)
            for each in x[:2]:
                h = self.cell(each, h)
            a = b = h
            for each in x[2:]:
                a, b = self.cell(each, a), self.cell(-each, b)
            return a, b, h

    torch.manual_seed(0)
    program = rolled(Net(), x_of(4))
    assert ops(program).count(SPARSE) == 2
    assert list(decisions(program)) == ["cell 4 steps", "cell@3 2 steps"]


def test_layers_and_loops_stand_in_the_order_of_the_graph() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.layer = nn.GRUCell(IN, HIDDEN), nn.GRU(HIDDEN, 5)

        def forward(self, x: Tensor) -> Any:
            h, states = x.new_zeros(x.shape[1], HIDDEN), []
            for each in x:
                h = self.cell(each, h)
                states.append(h)
            return self.layer(torch.stack(states))[0]

    program = trace(Net(), (x_of(2),))
    found = lower_recurrences(program, LowerRecurrences(sparse_rnn=True))
    assert list(decisions(found)) == ["cell 2 steps", "layer layer 0"]
