"""lower_recurrences: loops over cells that stay, or are rolled in part, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.passes.lower_recurrences import LowerRecurrences, lower_recurrences
from graphpar.testing import compare, rewrite
from graphpar.trace import trace
from tests.unit.sparse_loops import HIDDEN, IN, SPARSE, Cells, decisions, ops, rolled, x_of

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


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
        ("feeds", "the input of a step depends on a state before it: test_sparse_loops_kept.py:"),
        ("cell state", "the cell state of a step is used outside: test_sparse_loops_kept.py:"),
        ("changed", "its state is changed between steps: test_sparse_loops_kept.py:"),
        ("cell changed", "its state is changed between steps: test_sparse_loops_kept.py:"),
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
    assert decision.startswith(
        "dense: a gate of a step is used outside: test_sparse_loops_kept.py:"
    )


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
