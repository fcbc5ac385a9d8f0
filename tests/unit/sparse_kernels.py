"""What the tests of generated kernels share: a launch on interleaved blocks, and a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn import stepwise
from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.interleave import Schedule, launch
from graphpar.codegen.sparse_rnn.reference import Reference

FAST_SPEC = FastSpec(
    part="forward",
    cell_name="rnn_tanh",
    hidden=192,
    batch=4,
    programs=8,
    warps=4,
    register_words=6,
    rows=32,
    slots=4,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recurrence, a schedule and an edit of the kernels' text."""

    cell: str = "rnn_tanh"
    hidden: int = 33
    batch: int = 3
    steps: int = 2
    programs: int = 3
    threads: int = 64
    density: float = 0.2
    state: str = "fp32"
    sync: str = "lamport"
    reverse: bool = False
    seed: int = 0
    launches: int = 2
    patience: int = 400
    edit: Callable[[str], str] = lambda text: text


def run(case: Case, folder: Path) -> dict[str, float]:
    """The largest differences from the library's products, by name, over all launches."""
    torch.manual_seed(case.seed)
    gates, lstm = CELLS[case.cell].gates, case.cell == "lstm"
    shape = gates * case.hidden, case.hidden
    weight = 0.3 * torch.randn(shape) * (torch.rand(shape) < case.density)
    weight[1:2] = 0
    reference = Reference(
        weight,
        case.cell,
        case.batch,
        launch=launcher(case),
        programs=case.programs,
        threads=case.threads,
        state=case.state,
        sync=case.sync,
        reverse=case.reverse,
        spin=False,
        folder=folder,
        edit=case.edit,
    )
    for exchange in reference.exchanges:  # what freed memory may hold, of no epoch to come
        exchange.words.random_(-(2**62), 0)
    worst: dict[str, float] = {}
    for _ in range(case.launches):
        x = torch.randn(case.steps, case.batch, shape[0])
        bias, h = 0.2 * torch.randn(shape[0]), 0.3 * torch.randn(case.batch, case.hidden)
        c = torch.randn(case.batch, case.hidden) if lstm else None
        dout = torch.randn(case.steps, case.batch, case.hidden)
        dc = torch.randn(case.batch, case.hidden) if lstm else None
        found = reference.forward(x, bias, h, c)
        wanted = stepwise.forward(x, weight, bias, None, h, c, case.cell, case.reverse, True)
        note(worst, ("out", "c", "saved"), found, wanted)
        back = reference.backward(dout, dc, wanted[0], wanted[2], h, c)
        wanted_back = stepwise.backward(
            dout, dc, wanted[0], wanted[2], weight, None, h, c, case.cell, case.reverse
        )
        note(worst, ("dgates", "drecurrent", "dh", "dc"), back, wanted_back)
    return worst


def launcher(case: Case) -> Callable[[Any, int, Any], None]:
    def start(kernel: Any, programs: int, arguments: Any) -> None:
        schedule = Schedule(
            seed=case.seed,
            weak=True,
            shared=[arguments["exchange_ptr"]],
            patience=case.patience,
        )
        launch(kernel, programs, arguments, schedule)

    return start


def note(
    worst: dict[str, float],
    names: tuple[str, ...],
    found: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
) -> None:
    for name, a, b in zip(names, found, wanted, strict=False):
        if a.numel() and b.numel():  # what a cell does not have is empty
            difference = float((a - b).abs().nan_to_num(torch.inf).max())
            worst[name] = max(difference, worst.get(name, 0.0))
