"""Sparse recurrences on a GPU: the fast kernels against torch.nn.

    python benchmarks/gpu_sparse_rnn.py [--dry]

First every cell, forward and backward, in every type and with both ways to wait, is compared with
the library's products, then the op with its gradients, weights that change and patterns that grow,
and a replayed CUDA graph. Then come the floor (a matrix without non-zeros: exchange and cell
alone), Lamport words against the counter barrier, and the time of a step against torch.nn in three
types, and against FlashRNN where that is installed. Takes at most four minutes: what the aims are
about comes first, and no case starts after three. With triton 3.6, whose Gluon does not gather from
shared memory, only the reference kernels are checked and timed. Without a GPU it says so and exits
with 0; --dry goes through all of it there, in Triton's interpreter, at a size whose times say
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _common
import numpy as np
import torch
from _bars import bars
from _common import report, table
from _gpu_rnn_checks import (
    FORMS,
    Place,
    check_graphs,
    check_kernels,
    check_op,
    check_reference,
    operands,
    reference_of,
    weight_of,
)
from torch import Tensor, nn

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.interleave import Schedule, interpreting, launch
from graphpar.codegen.sparse_rnn.interpreted import InterpretedLauncher
from graphpar.codegen.sparse_rnn.kernels import launching
from graphpar.codegen.sparse_rnn.launch import (
    LEAST_TRITON,
    FastLauncher,
    described,
    triton_version,
)
from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn
from graphpar.errors import CapacityError

LAST_START_S = 180.0
CELLS = ("lstm", "gru", "rnn_tanh")
TYPES = (torch.float16, torch.bfloat16, torch.float32)
AIMS = {("lstm", 4096, 0.1): 8.0, ("lstm", 2304, 0.1): 3.0, ("gru", 2304, 0.3): 2.0}
MODULES: dict[str, Callable[[int], nn.Module]] = {
    "lstm": lambda hidden: nn.LSTM(hidden, hidden),
    "gru": lambda hidden: nn.GRU(hidden, hidden),
    "rnn_tanh": lambda hidden: nn.RNN(hidden, hidden),
}


@dataclass(frozen=True)
class Case:
    cell: str
    hidden: int
    density: float
    batch: int

    def __str__(self) -> str:
        return f"{self.cell} {self.hidden} {self.density:.0%} batch {self.batch}"


def cases(dry: bool) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Cases and forms: what the aims are about, and their floors, first in bf16; then the rest."""
    if dry:
        for cell in CELLS[:2]:
            yield Case(cell, 33, 0.0, 3), ("bf16",)
            yield Case(cell, 33, 0.1, 3), tuple(FORMS)
        return
    first = [Case(cell, hidden, density, 4) for cell, hidden, density in AIMS]
    first += [replace(case, density=0.0) for case in first]
    yield from ((case, ("bf16",)) for case in first)
    rest = [
        Case(cell, hidden, density, batch)
        for batch in (4, 1, 8)
        for hidden in (2304, 1152, 4096)
        for cell in CELLS
        for density in (0.1, 0.3, 0.0)
    ]
    for case in dict.fromkeys([*first, *rest]):
        yield case, tuple(FORMS) if case.batch == 4 else ("bf16",)


class Clock:
    """Times at a place; ``steps``: of a sequence."""

    def __init__(self, place: Place) -> None:
        self.place, self.steps = place, 2 if place.dry else 200
        self._dense: dict[Any, float] = {}

    def step_us(self, run: Callable[[], Any]) -> float:
        """Median microseconds of a step, of sequences that are queued behind each other."""
        times, repeats = [], 1 if self.place.dry else 4
        for _ in range(1 if self.place.dry else 5):
            self._wait()
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            self._wait()
            times.append((time.perf_counter() - started) / repeats)
        return 1e6 * float(np.median(times[1:] or times)) / self.steps

    def _wait(self) -> None:
        if not self.place.dry:
            torch.cuda.synchronize()

    def dense_us(self, case: Case, dtype: torch.dtype) -> float:
        """A step of torch.nn's recurrence: that of a sequence, less the input's product."""
        key = case.cell, case.hidden, case.batch, dtype
        if key not in self._dense:
            module = MODULES[case.cell](case.hidden).to(self.place.device, dtype)
            shape = self.steps, case.batch, case.hidden
            x = torch.randn(shape, device=self.place.device, dtype=dtype)
            weight: Any = module.weight_ih_l0
            with torch.no_grad():
                both = self.step_us(lambda: module(x))
                self._dense[key] = both - self.step_us(lambda: x @ weight.t())
        return self._dense[key]

    def flash_us(self, case: Case) -> float | None:
        """A step of FlashRNN (Poeppel et al. 2024) in bf16 with one head, where installed: the
        faster of its kernels that take the size."""
        try:
            from flashrnn import flashrnn
        except ImportError:
            return None
        name = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "elman"}[case.cell]
        gates, hidden = cell_of(case.cell).gates, case.hidden
        biases = 4 if case.cell == "gru" else gates  # a GRU's last gate has two
        kinds: dict[str, Any] = {"device": self.place.device, "dtype": torch.bfloat16}
        x = torch.randn(case.batch, self.steps, gates, 1, hidden, **kinds)
        matrix = torch.randn(gates, 1, hidden, hidden, **kinds) * hidden**-0.5
        bias = torch.zeros(biases, 1, hidden, **kinds)
        found = []
        for backend in ("cuda_fused", "cuda"):
            given = {"function": name, "backend": backend}
            try:
                found.append(self.step_us(lambda g=given: flashrnn(x, matrix, bias, **g)))  # type: ignore[misc]
            except Exception as error:  # sizes that it refuses: no figure, and the reason
                print(f"FlashRNN {backend} {case}: {error}")
        return min(found, default=None)

    def kernels_us(self, case: Case, weight: Tensor, forms: Iterable[str]) -> dict[str, Any]:
        """By form, the microseconds of a step, or why there are none."""
        found: dict[str, Any] = {}
        given = operands(self.place, case.cell, case.hidden, case.batch, self.steps)
        for form in forms:
            try:
                fast = self.place.fast(case.cell, weight, case.batch, save=False, **FORMS[form])
            except CapacityError as error:
                found[form] = str(error)
                continue
            found[form] = self.step_us(lambda f=fast: f.forward(*given))  # type: ignore[misc]
        return found

    def op_us(self, case: Case, weight: Tensor) -> float:
        """A step of the op in bf16, which takes the weight's values at each call."""
        x, bias, h, c = operands(self.place, case.cell, case.hidden, case.batch, self.steps)
        x, bias, h, weight = (t.bfloat16() for t in (x, bias, h, weight))
        c = None if c is None else c.bfloat16()
        with torch.no_grad():
            return self.step_us(lambda: sparse_rnn(x, weight, bias, None, h, c, case.cell))


def measure(place: Place, started: float) -> list[dict[str, Any]]:
    found: dict[Case, dict[str, Any]] = {}
    clock = Clock(place)
    for case, forms in cases(place.dry):
        if time.perf_counter() - started > LAST_START_S:
            print(f"no time left for {case} and what comes after it")
            break
        weight = weight_of(place, case.cell, case.hidden, case.density)
        one = found.setdefault(case, {"case": str(case), **vars(case)})
        one |= clock.kernels_us(case, weight, [form for form in forms if form not in one])
        if "dense_us" in one:
            continue
        one["dense_us"] = {str(t).removeprefix("torch."): clock.dense_us(case, t) for t in TYPES}
        one["flash_us"] = clock.flash_us(case) if case.batch == 4 else None
        if isinstance(one["bf16"], float):
            one["op_us"] = clock.op_us(case, weight)
            one["gain"] = min(one["dense_us"].values()) / one["bf16"]
    return list(found.values())


def measure_reference(place: Place) -> list[dict[str, Any]]:
    found, clock = [], Clock(place)
    for cell in CELLS:
        case = Case(cell, 33 if place.dry else 1152, 0.1, 3 if place.dry else 4)
        weight = weight_of(place, cell, case.hidden, case.density)
        given = operands(place, cell, case.hidden, case.batch, clock.steps)
        one: dict[str, Any] = {"case": f"reference {case}"}
        for form, state in (("bf16", "bf16"), ("fp32", "fp32")):
            kernels = reference_of(place, cell, weight, case.batch, state=state)
            one[form] = clock.step_us(lambda k=kernels, g=given: k.forward(*g))  # type: ignore[misc]
        one["dense_us"] = {str(t).removeprefix("torch."): clock.dense_us(case, t) for t in TYPES}
        found.append(one)
    return found


def shown(found: list[dict[str, Any]]) -> str:
    """The figures as a table, and how the aims are met."""

    def cell(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else "no" if value else ""

    rows = []
    for one in found:
        own = [cell(one.get(form)) for form in (*FORMS, "op_us")]
        dense = [cell(v) for v in one["dense_us"].values()]
        rows.append([one["case"], *own, *dense, cell(one.get("flash_us")), cell(one.get("gain"))])
    head = ["us a step", *FORMS, "op, bf16", *(f"torch.nn {t}"[:13] for t in ("fp16", "bf16"))]
    lines = [table([*head, "torch.nn fp32", "FlashRNN", "gain of bf16"], rows), ""]
    known = {(o.get("cell"), o.get("hidden"), o.get("density"), o.get("batch")): o for o in found}
    for (name, hidden, density), aim in AIMS.items():
        one, floor = (known.get((name, hidden, d, 4), {}) for d in (density, 0.0))
        if "gain" in one:
            above = f"{one['bf16'] / floor['bf16']:.2f} times the floor" if "gain" in floor else ""
            lines.append(f"- {one['case']}: {one['gain']:.2f}, aim {aim:g}; {above}")
    lines.append('\nDensity 0 is the floor: exchange and cell alone. "no": does not fit on chip.')
    return "\n".join(lines)


def chart(found: list[dict[str, Any]]) -> str:
    groups = []
    for one in found:
        values = {form: one[form] for form in FORMS if isinstance(one.get(form), float)}
        values["torch.nn, best type"] = min(one["dense_us"].values())
        groups.append((one["case"], values))
    return bars("microseconds a step", groups)


def gpu() -> Place:
    def reference(kernel: Any, programs: int, arguments: Any) -> None:
        kernel[(programs,)](**arguments, num_warps=16, launch_cooperative_grid=True)

    device = torch.device("cuda", torch.cuda.current_device())
    planned = described(torch.cuda.get_device_properties(device))
    return Place(device, FastLauncher(), planned, reference)


def interpreter(folder: Path) -> Place:
    def reference(kernel: Any, programs: int, arguments: Any) -> None:
        launch(kernel, programs, arguments, Schedule(patience=100))

    small = replace(DEVICES["sm_90"], name="interpreter", multiprocessors=3)
    return Place(torch.device("cpu"), InterpretedLauncher(folder), small, reference, dry=True)


def run(place: Place) -> str:
    """All of it; writes the figures and the chart, returns the report."""
    started = time.perf_counter()
    torch.manual_seed(0)
    head = ["largest relative difference", "forward", "backward"]
    if triton_version() < LEAST_TRITON:
        checked, found = check_reference(place), measure_reference(place)
        note = "This triton is older than the fast kernels need: reference kernels alone."
    else:
        checked = [*check_kernels(place), *check_op(place)]
        note = "A replayed CUDA graph of the op gives what fresh launches give, bit by bit."
        if place.dry:
            checked += check_reference(place)
            with launching(place.launch, place.planned):
                found = [*measure(place, started), *measure_reference(place)]
            note = "Interpreted: the times say nothing."
        else:
            check_graphs(place)
            found = measure(place, started)
    _common.RESULTS.mkdir(exist_ok=True)
    (_common.RESULTS / "gpu_sparse_rnn.json").write_text(json.dumps(found, indent=1))
    (_common.RESULTS / "gpu_sparse_rnn.svg").write_text(chart(found))
    seconds = time.perf_counter() - started
    return f"{table(head, checked)}\n\n{note}\n\n{shown(found)}\n\n{seconds:.0f} s in all."


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse recurrences on a GPU against torch.nn.")
    parser.add_argument("--dry", action="store_true", help="in Triton's interpreter, on the CPU")
    options = parser.parse_args()
    if options.dry:
        if not interpreting():  # triton reads it when it is imported
            os.environ["TRITON_INTERPRET"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        with tempfile.TemporaryDirectory() as folder:
            place = interpreter(Path(folder))
            _common.RESULTS = Path(folder)
            report("gpu_sparse_rnn", "Sparse recurrences, interpreted", run(place))
        return
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    name = torch.cuda.get_device_name(0)
    report("gpu_sparse_rnn", "Sparse recurrences on a GPU", f"{name}\n\n{run(gpu())}")


if __name__ == "__main__":
    main()
