"""What gpu_sparse_rnn.py checks before it measures: kernels and the op, against products in
float64 or float32 of the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn import stepwise
from graphpar.codegen.sparse_rnn.cells import CELLS, cell_of
from graphpar.codegen.sparse_rnn.devices import Device
from graphpar.codegen.sparse_rnn.fast import Fast
from graphpar.codegen.sparse_rnn.fast_part import Launch
from graphpar.codegen.sparse_rnn.kernels import active, launching
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from graphpar.codegen.sparse_rnn.reference import Reference
from graphpar.errors import GraphparWarning, KernelError

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, counter": {"sync": "counter"},
    "fp16": {"value": "fp16"},
    "fp32": {"value": "fp32"},
    "fp32, counter": {"value": "fp32", "sync": "counter"},
}
LIMITS = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-3}
"""Relative to the largest element; states of 16 bits are rounded at every step."""


@dataclass(frozen=True)
class Place:
    """Where kernels run: a GPU, or (``dry``) the interpreter, at sizes that it can bear."""

    device: torch.device
    launch: Launch
    planned: Device
    reference: Callable[[Any, int, Any], None]
    dry: bool = False

    def fast(self, cell: str, weight: Tensor, batch: int, **options: Any) -> Fast:
        """Raises CapacityError where it does not fit."""
        given: dict[str, Any] = {"launch": self.launch, "device": self.planned, **options}
        return Fast.planned(weight, cell, batch, **given)


def weight_of(place: Place, cell: str, hidden: int, density: float) -> Tensor:
    shape = cell_of(cell).gates * hidden, hidden
    weight = torch.randn(shape, device=place.device) * hidden**-0.5
    return (weight * (torch.rand(shape, device=place.device) < density)).bfloat16().float()


def operands(place: Place, cell: str, hidden: int, batch: int, steps: int) -> tuple[Any, ...]:
    """The gates' input part, the recurrent bias, the first states."""
    rows, device = cell_of(cell).gates * hidden, place.device
    x = torch.randn(steps, batch, rows, device=device)
    bias = 0.1 * torch.randn(rows, device=device)
    h = 0.3 * torch.randn(batch, hidden, device=device)
    c = torch.randn(batch, hidden, device=device) if cell == "lstm" else None
    return x, bias, h, c


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, relative to the largest element."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    worst = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    return float(worst.nan_to_num(torch.inf))


def both_parts(place: Place, kernels: Any, cell: str, weight: Tensor, size: Any) -> list[float]:
    """Largest differences of forward and of backward."""
    hidden, batch, steps = size
    x, bias, h, c = operands(place, cell, hidden, batch, steps)
    found = kernels.forward(x, bias, h, c)
    wanted = stepwise.forward(x, weight, bias, None, h, c, cell, False, True)
    dout, dc = torch.randn_like(found[0]), None if c is None else torch.randn_like(c)
    back = kernels.backward(dout, dc, wanted[0], wanted[2], h, c)
    saved = wanted[0], wanted[2], weight, None, h, c
    wanted_back = stepwise.backward(dout, dc, *saved, cell, False)
    return [
        difference(found[0], wanted[0]),
        max(difference(back[i], wanted_back[i]) for i in (0, 2)),
    ]


def check_kernels(place: Place) -> list[list[object]]:
    """Rows of a table; AssertionError if a difference is too large."""
    rows: list[list[object]] = []
    for cell in CELLS:
        for form, options in FORMS.items():
            sizes = ((257, 3, 33), (1152, 11, 5)) if form == "bf16" else ((257, 3, 9),)
            for size in ((33, 3, 2),) if place.dry else sizes:
                weight = weight_of(place, cell, size[0], 0.1)
                fast = place.fast(cell, weight, size[1], **options)
                worst = both_parts(place, fast, cell, weight, size)
                row = [f"{cell} {size[0]} batch {size[1]} {form}", *(f"{w:.1e}" for w in worst)]
                rows.append(row)
                limit = LIMITS[torch.float32 if form.startswith("fp32") else torch.bfloat16]
                assert max(worst) < limit, row
    return rows


def check_reference(place: Place) -> list[list[object]]:
    """As :func:`check_kernels`, of the kernels in plain Triton."""
    rows: list[list[object]] = []
    for cell in CELLS:
        for state, sync in (("fp32", "lamport"), ("fp32", "counter"), ("bf16", "lamport")):
            size = (33, 3, 2) if place.dry else (257, 3, 9)
            weight = weight_of(place, cell, size[0], 0.1)
            reference = reference_of(place, cell, weight, size[1], state=state, sync=sync)
            worst = both_parts(place, reference, cell, weight, size)
            name = f"{cell} {size[0]} batch {size[1]} {state}, {sync}"
            rows.append([name, *(f"{w:.1e}" for w in worst)])
            limit = LIMITS[torch.float32 if state == "fp32" else torch.bfloat16]
            assert max(worst) < limit, rows[-1]
    return rows


def reference_of(place: Place, cell: str, weight: Tensor, batch: int, **options: Any) -> Reference:
    return Reference(
        weight,
        cell,
        batch,
        launch=place.reference,
        programs=place.planned.multiprocessors,
        threads=64 if place.dry else 512,
        spin=not place.dry,
        **options,
    )


# --- the op ---


def op_of(weight: Tensor, given: Any, cell: str, dtype: torch.dtype, device: Any) -> list[Tensor]:
    """The op's results, and the gradients of their sum of squares, on a device."""
    leaves = [None if t is None else t.detach().to(device, dtype) for t in (weight, *given)]
    leaves = [None if t is None else t.requires_grad_() for t in leaves]
    matrix, x, bias, h, c = leaves
    found: Any = sparse_rnn(x, matrix, bias, None, h, c, cell)[: 3 if c is not None else 2]
    loss = sum(each.float().square().sum() for each in found)
    sources = [t for t in leaves if t is not None]
    assert isinstance(loss, Tensor)
    return [*found, *torch.autograd.grad(loss, sources)]


@contextmanager
def by_kernels(place: Place) -> Iterator[None]:
    """The op must run by kernels within, and not warn that it does not."""
    own = launching(place.launch, place.planned) if place.dry else nullcontext(active())
    with own as kernels, warnings.catch_warnings():
        warnings.simplefilter("error", GraphparWarning)
        before = kernels.served
        yield
        assert kernels.served > before, "the op ran by the library's products"


def check_op(place: Place) -> list[list[object]]:
    """The op with its gradients against itself in float64 by the library's products."""
    rows: list[list[object]] = []
    hidden, batch, steps = (20, 3, 2) if place.dry else (320, 3, 12)
    cpu = torch.device("cpu")
    for cell in CELLS:
        for dtype, limit in LIMITS.items():
            weight = weight_of(place, cell, hidden, 0.1)
            given = operands(place, cell, hidden, batch, steps)
            rounded = [None if t is None else t.to(dtype) for t in given]
            with by_kernels(place):
                found = op_of(weight, rounded, cell, dtype, place.device)
            wanted = op_of(weight.to(dtype), rounded, cell, torch.float64, cpu)
            worst = [difference(a, b) for a, b in zip(found, wanted, strict=True)]
            count = len(found) - 4 - (cell == "lstm")
            row = [f"op {cell} {dtype}".replace("torch.", "")]
            rows.append([*row, f"{max(worst[:count]):.1e}", f"{max(worst[count:]):.1e}"])
            assert max(worst) < limit, rows[-1]
    rows.append(["op: weights that change, and grow", f"{_changes(place):.1e}", ""])
    return rows


def _changes(place: Place) -> float:
    hidden = 20 if place.dry else 320
    weight = weight_of(place, "gru", hidden, 0.1)
    given = operands(place, "gru", hidden, 2, 2)
    found, weights = [], []
    with by_kernels(place):
        for change in ("", "scaled", "grown"):
            if change == "scaled":
                weight *= 0.5
            if change == "grown":
                weight += 0.1 * (torch.rand_like(weight) < 0.05)
            weights.append(weight.clone())
            found.append(op_of(weight, given, "gru", torch.float32, place.device))
    worst = 0.0
    for own, results in zip(weights, found, strict=True):
        wanted = op_of(own, given, "gru", torch.float64, torch.device("cpu"))
        worst = max(worst, *(difference(a, b) for a, b in zip(results, wanted, strict=True)))
    assert worst < LIMITS[torch.float32], worst
    return worst


def check_graphs(place: Place) -> None:
    """A CUDA graph of the op: it takes the values of its replay; a pattern that grew is NaN."""
    weight = weight_of(place, "lstm", 1152, 0.1)
    x, bias, h, c = operands(place, "lstm", 1152, 4, 7)

    def run() -> Tensor:
        with torch.no_grad():
            return sparse_rnn(x, weight, bias, None, h, c, "lstm")[0]

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        out = run()
    for _ in range(3):
        weight *= 0.9
        graph.replay()
        again = out.clone()
        assert difference(again, run()) == 0, "a replayed graph differs from a fresh launch"
    active().check()
    weight[weight == 0] = 0.01
    graph.replay()
    assert bool(out.isnan().all()), "a replayed graph gives numbers of a pattern that grew"
    try:
        active().check()
    except KernelError:
        return
    raise AssertionError("no error tells of the pattern that grew")
