"""What the tests of loops over cells share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.program import Program
from graphpar.testing import assert_equivalent

SPARSE = torch.ops.graphpar_rnn.sparse_rnn.default
IN, HIDDEN = 6, 7

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
