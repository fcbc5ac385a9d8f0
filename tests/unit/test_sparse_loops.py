"""lower_recurrences: cells that are called step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar
from tests.unit.sparse_loops import CELLS, HIDDEN, IN, SPARSE, Cells, ops, rolled, x_of

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


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

    def gru_turned(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """With z as Cho et al. 2014 have it: what is new, not what is kept."""
        r, z, n = (x @ self.W).split(HIDDEN, 1)
        hr, hz, hn = (h @ self.U + self.b).split(HIDDEN, 1)
        z, n = torch.sigmoid(z + hz), torch.tanh(n + torch.sigmoid(r + hr) * hn)
        return (1 - z) * h + z * n, c

    def gru_lerp(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z, r, n = (x @ self.W + self.b).split(HIDDEN, 1)
        hn, hz, hr = (h @ self.U).split(HIDDEN, 1)
        n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        return torch.lerp(n, h, torch.sigmoid(z + hz)), c


@pytest.mark.parametrize(
    "write",
    ["tanh", "relu_scaled", "no_input", "one_matrix", "lstm_one_matrix", "lstm_linears", "gru",
     "gru_lerp", "gru_turned"],
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
