"""Sparse recurrences on a GPU: the fast kernels against torch.nn.

    python benchmarks/gpu_sparse_rnn.py

First every cell, forward and backward, in every type and with both ways to wait, is compared with
the library's products, and a replayed CUDA graph with fresh launches. Then come the floor (a matrix
without non-zeros: exchange and cell alone), Lamport words against the counter barrier, and the time
of a step against torch.nn in three types, and against FlashRNN where that is installed. Takes at
most four minutes. Without a GPU it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _common import RESULTS, report, table
from torch import Tensor, nn

from graphpar.codegen.sparse_rnn import stepwise
from graphpar.codegen.sparse_rnn.cells import CELLS, cell_of
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.fast import Fast
from graphpar.codegen.sparse_rnn.launch import FastLauncher
from graphpar.errors import CapacityError, KernelError

STEPS = 200
LAUNCHER = FastLauncher()
BUDGET_S = 200.0
SIZES = (1152, 2304, 4096)
AIMS = {("lstm", 4096, 0.1): 8.0, ("lstm", 2304, 0.1): 3.0, ("gru", 2304, 0.3): 2.0}
MODULES: dict[str, Callable[[int], nn.Module]] = {
    "lstm": lambda hidden: nn.LSTM(hidden, hidden),
    "gru": lambda hidden: nn.GRU(hidden, hidden),
    "rnn_tanh": lambda hidden: nn.RNN(hidden, hidden),
    "rnn_relu": lambda hidden: nn.RNN(hidden, hidden, nonlinearity="relu"),
}


def weight_of(cell: str, hidden: int, density: float) -> Tensor:
    shape = cell_of(cell).gates * hidden, hidden
    weight = torch.randn(shape, device="cuda") * hidden**-0.5
    return (weight * (torch.rand(shape, device="cuda") < density)).bfloat16().float()


def fast_of(cell: str, weight: Tensor, batch: int, **options: Any) -> Fast:
    """Raises CapacityError where it does not fit."""
    properties = torch.cuda.get_device_properties(0)
    known = [d for d in DEVICES.values() if d.capability == 10 * properties.major]
    if not known:
        raise KernelError(f"no figures for compute capability {properties.major}.x")
    device = replace(known[0], multiprocessors=properties.multi_processor_count)
    return Fast.planned(weight, cell, batch, launch=LAUNCHER, device=device, **options)


def operands(cell: str, hidden: int, batch: int, steps: int) -> tuple[Any, ...]:
    x = torch.randn(steps, batch, cell_of(cell).gates * hidden, device="cuda")
    bias = 0.1 * torch.randn(cell_of(cell).gates * hidden, device="cuda")
    h = 0.3 * torch.randn(batch, hidden, device="cuda")
    c = torch.randn(batch, hidden, device="cuda") if cell == "lstm" else None
    return x, bias, h, c


FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, counter": {"sync": "counter"},
    "fp16": {"value": "fp16"},
    "fp32": {"value": "fp32"},
    "fp32, counter": {"value": "fp32", "sync": "counter"},
}


def correctness() -> list[list[object]]:
    """Largest differences of outputs and gradients; raises AssertionError if one is too large."""
    rows: list[list[object]] = []
    for cell in CELLS:
        for form, options in FORMS.items():
            sizes = (
                ((257, 3, 9), (1152, 4, 33), (1152, 11, 5)) if form == "bf16" else ((257, 5, 9),)
            )
            for hidden, batch, steps in sizes:
                weight = weight_of(cell, hidden, 0.1)
                fast = fast_of(cell, weight, batch, **options)
                x, bias, h, c = operands(cell, hidden, batch, steps)
                found = fast.forward(x, bias, h, c)
                wanted = stepwise.forward(x, weight, bias, None, h, c, cell, False, True)
                dout, dc = torch.randn_like(found[0]), None if c is None else torch.randn_like(c)
                back = fast.backward(dout, dc, wanted[0], wanted[2], h, c)
                wanted_back = stepwise.backward(
                    dout, dc, wanted[0], wanted[2], weight, None, h, c, cell, False
                )
                forward, backward = (
                    float((a - b).abs().max() / b.abs().max())
                    for a, b in ((found[0], wanted[0]), (back[0], wanted_back[0]))
                )
                name = f"{cell} {hidden} batch {batch} {form}"
                rows.append([name, f"{forward:.1e}", f"{backward:.1e}"])
                limit = 1e-3 if form.startswith("fp32") else 3e-2
                assert max(forward, backward) < limit, rows[-1]
    return rows


def replays() -> float:
    """The largest difference of a replayed CUDA graph of two launches from fresh ones."""
    fast = fast_of("lstm", weight_of("lstm", 1152, 0.1), 4, save=False)
    given = operands("lstm", 1152, 4, 7)
    wanted = fast.forward(*given)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast.forward(*given)
        found = fast.forward(*given)[0]
    worst = 0.0
    for _ in range(5):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        worst = max(worst, float((found - wanted).abs().max()))
    fast.check()
    assert worst == 0, worst
    return worst


def step_us(run: Callable[[], Any], steps: int, repeats: int = 5) -> float:
    """Median microseconds of a step."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e6 * float(np.median(times[2:])) / steps


def dense_us(cell: str, hidden: int, batch: int, dtype: torch.dtype) -> float:
    """A step of torch.nn's recurrence: that of a sequence, less the input's product."""
    module = MODULES[cell](hidden).to("cuda", dtype)
    x = torch.randn(STEPS, batch, hidden, device="cuda", dtype=dtype)
    weight: Any = module.weight_ih_l0
    with torch.no_grad():
        both = step_us(lambda: module(x), STEPS)
        return both - step_us(lambda: x @ weight.t(), STEPS)


def flash_us(cell: str, hidden: int, batch: int) -> float | None:
    """A step of FlashRNN (Poeppel et al. 2024) in bf16 with one head, where installed: the faster
    of its kernels that take the size."""
    try:
        from flashrnn import flashrnn
    except ImportError:
        return None
    name = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "elman"}[cell]
    gates = cell_of(cell).gates
    biases = 4 if cell == "gru" else gates  # a GRU's last gate has two
    kinds: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(batch, STEPS, gates, 1, hidden, **kinds)
    matrix = torch.randn(gates, 1, hidden, hidden, **kinds) * hidden**-0.5
    bias = torch.zeros(biases, 1, hidden, **kinds)
    found = []
    for backend in ("cuda_fused", "cuda"):
        options = {"function": name, "backend": backend}
        try:
            found.append(step_us(lambda o=options: flashrnn(x, matrix, bias, **o), STEPS))  # type: ignore[misc]
        except Exception as error:  # sizes that it refuses: no figure, and the reason
            print(f"FlashRNN {backend} {cell} {hidden}: {error}")
    return min(found, default=None)


def times(started: float) -> list[dict[str, Any]]:
    found = []
    types = (torch.float16, torch.bfloat16, torch.float32)
    for hidden in SIZES:
        for cell in ("rnn_tanh", "gru", "lstm"):
            for batch in (4, 1, 8):
                if time.perf_counter() - started > BUDGET_S:
                    return found
                dense = {str(t): dense_us(cell, hidden, batch, t) for t in types}
                flash = flash_us(cell, hidden, batch) if batch == 4 else None
                for density in (0.0, 0.1, 0.3):
                    weight = weight_of(cell, hidden, density)
                    one: dict[str, Any] = {"cell": cell, "hidden": hidden, "batch": batch}
                    one |= {"density": density, "dense_us": dense, "flash_us": flash}
                    forms = FORMS if batch == 4 else {"bf16": FORMS["bf16"]}
                    for form, options in forms.items():
                        try:
                            fast = fast_of(cell, weight, batch, save=False, **options)
                        except CapacityError as error:
                            one[form] = str(error)
                            continue
                        given = operands(cell, hidden, batch, STEPS)
                        one[form] = step_us(lambda f=fast, g=given: f.forward(*g), STEPS)  # type: ignore[misc]
                    if isinstance(one["bf16"], float):
                        one["gain"] = min(dense.values()) / one["bf16"]
                    found.append(one)
    return found


def main() -> None:
    argparse.ArgumentParser().parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    started = time.perf_counter()
    torch.manual_seed(0)
    right = correctness()
    replays()
    found = times(started)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu_sparse_rnn.json").write_text(json.dumps(found, indent=1))
    rows = []
    for f in found:
        times_us = [f.get(form, "") for form in FORMS]
        shown = ["no" if isinstance(t, str) and t else t for t in times_us]
        cells = [f"{t:.2f}" if isinstance(t, float) else t for t in shown]
        flash = "" if f["flash_us"] is None else f"{f['flash_us']:.2f}"
        name = f"{f['cell']} {f['hidden']} {f['density']:.0%} batch {f['batch']}"
        gain = f"{f['gain']:.2f}" if "gain" in f else ""
        rows.append([name, *cells, f"{min(f['dense_us'].values()):.2f}", flash, gain])
    verdicts = []
    for (cell, hidden, density), aim in AIMS.items():
        for f in found:
            if (f["cell"], f["hidden"], f["density"], f["batch"]) == (cell, hidden, density, 4):
                gain = f.get("gain", 0.0)
                name = f"{cell} {hidden} {density:.0%}"
                verdicts.append(f"{name}: {gain:.2f} of {aim:g}")
    head = ["us a step", *FORMS, "torch.nn, best type", "FlashRNN", "gain of bf16"]
    body = (
        f"{torch.cuda.get_device_name(0)}\n\n"
        f"{table(['cell', 'forward, relative', 'backward, relative'], right)}\n\n"
        f"A replayed CUDA graph gives what fresh launches give, bit by bit.\n\n"
        f"{table(head, rows)}\n\n"
        f'Density 0 is the floor; "no": does not fit. Aims: {"; ".join(verdicts)}.'
    )
    report("gpu_sparse_rnn", "Sparse recurrences on a GPU", body)


if __name__ == "__main__":
    main()
