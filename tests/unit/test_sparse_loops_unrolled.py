"""lower_recurrences: recurrences in a trace that are no loop it can roll up are in the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.passes.lower_recurrences import LowerRecurrences, lower_recurrences
from graphpar.trace import trace
from tests.unit.sparse_loops import CELLS, HIDDEN, IN, SPARSE, decisions, ops, x_of


def reasons(model: nn.Module, x: Tensor) -> dict[str, str]:
    torch.manual_seed(0)
    program = lower_recurrences(trace(model, (x,)), LowerRecurrences(sparse_rnn=True))
    assert SPARSE not in ops(program)
    return decisions(program)


class Autocast(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.lstm = CELLS[kind](IN, HIDDEN), kind == "lstm"

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], HIDDEN)
        state: Any = (h, h) if self.lstm else h
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for each in x:
                state = self.cell(each, state)
        found: Tensor = state[0] if self.lstm else state
        return found


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cells_under_autocast(kind: str) -> None:
    """Their products are of bf16, their states of fp32."""
    ((name, reason),) = reasons(Autocast(kind), x_of(3).detach()).items()
    assert name == "cell 3 steps" if kind == "lstm" else "cell 2 steps"
    assert reason.startswith("dense: its state ")
    assert "torch.bfloat16" in reason
    assert "(autocast): test_sparse_loops_unrolled.py:" in reason


def test_a_loop_of_one_type_under_autocast_is_rolled_up() -> None:
    program = trace(Autocast("rnn_tanh"), (x_of(3).detach(),))
    found = lower_recurrences(program, LowerRecurrences(sparse_rnn=True))
    assert ops(found).count(SPARSE) == 1


class Written(nn.Module):
    """tanh(x W + h U), for states of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.w, self.u = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        shape = {"vector": (HIDDEN,), "three": (x.shape[1], 1, HIDDEN)}
        h = x.new_zeros(shape.get(self.form, (HIDDEN, x.shape[1])))
        if self.form == "sine":
            h = h.t()
        for each in x:
            if self.form == "vector":
                h = torch.tanh(self.w(each[0]) + self.u(h))
            elif self.form == "three":
                h = torch.tanh(self.w(each[:, None]) + self.u(h))
            elif self.form == "columns":
                h = torch.tanh(self.w.weight @ each.t() + self.u.weight @ h)
            else:
                h = torch.sin(self.w(each) + self.u(h))
        return h


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("vector", f"its state has shape [{HIDDEN}]: one of [batch, units] could be one op"),
        ("three", f"its state has shape [2, 1, {HIDDEN}]: one of [batch, units] could be"),
        ("columns", "its state is a column [units, batch], W h: h W with rows of a batch could"),
        ("sine", "its steps have the form of no cell of torch.nn"),
    ],
)
def test_other_forms(form: str, reason: str) -> None:
    ((name, found),) = reasons(Written(form), x_of(3)).items()
    assert name.endswith(" 3 steps")
    assert found.startswith(f"dense: {reason}")
    assert ": test_sparse_loops_unrolled.py:" in found


def test_layers_that_share_weights_are_no_recurrence() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.down(F.relu(self.up(F.layer_norm(x, (IN,)))))
            return x

    program = trace(Tied(), (x_of(2),))
    assert lower_recurrences(program, LowerRecurrences(sparse_rnn=True)) is program
