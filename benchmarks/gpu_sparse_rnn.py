"""Sparse recurrences on a GPU: the fast kernels against torch.nn.

    python benchmarks/gpu_sparse_rnn.py

First every cell, forward and backward, is compared with the library's products; then come the
floor (a matrix without non-zeros: exchange and cell alone) and the time of a step against torch.nn
in three types. Takes at most four minutes. Without a GPU it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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
from graphpar.codegen.sparse_rnn.plan import plan_kernel
from graphpar.errors import CapacityError, KernelError

STEPS = 200
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


def fast_of(cell: str, weight: Tensor, batch: int, *, save: bool) -> Fast:
    """Raises CapacityError where it does not fit."""
    properties = torch.cuda.get_device_properties(0)
    known = [d for d in DEVICES.values() if d.capability == 10 * properties.major]
    if not known:
        raise KernelError(f"no figures for compute capability {properties.major}.x")
    rows = (weight != 0).sum(1).reshape(cell_of(cell).gates, -1).cpu().numpy()
    plan = plan_kernel(cell, rows, weight.shape[1], batch=batch, device=known[0])
    return Fast(
        weight,
        cell,
        batch,
        launch=FastLauncher(),
        programs=min(plan.programs, properties.multi_processor_count),
        warps=plan.warps,
        shared_words=plan.shared_words,
        save=save,
    )


def operands(cell: str, hidden: int, batch: int, steps: int) -> tuple[Any, ...]:
    x = torch.randn(steps, batch, cell_of(cell).gates * hidden, device="cuda")
    bias = 0.1 * torch.randn(cell_of(cell).gates * hidden, device="cuda")
    h = 0.3 * torch.randn(batch, hidden, device="cuda")
    c = torch.randn(batch, hidden, device="cuda") if cell == "lstm" else None
    return x, bias, h, c


def correctness() -> list[list[object]]:
    """Largest differences of outputs and gradients; raises AssertionError if one is too large."""
    rows: list[list[object]] = []
    for cell in CELLS:
        for hidden, batch, steps in ((257, 3, 9), (1152, 4, 33), (1152, 8, 5)):
            weight = weight_of(cell, hidden, 0.1)
            fast = fast_of(cell, weight, batch, save=True)
            x, bias, h, c = operands(cell, hidden, batch, steps)
            found = fast.forward(x, bias, h, c)
            wanted = stepwise.forward(x, weight, bias, None, h, c, cell, False, True)
            dout, dc = torch.randn_like(found[0]), None if c is None else torch.randn_like(c)
            back = fast.backward(dout, dc, wanted[0], wanted[2], h, c)
            wanted_back = stepwise.backward(
                dout, dc, wanted[0], wanted[2], weight, None, h, c, cell, False
            )
            forward = float((found[0] - wanted[0]).abs().max() / wanted[0].abs().max())
            largest = wanted_back[0].abs().max()
            backward = float((back[0] - wanted_back[0]).abs().max() / largest)
            rows.append([f"{cell} {hidden} batch {batch}", f"{forward:.1e}", f"{backward:.1e}"])
            assert forward < 3e-2, rows[-1]
            assert backward < 3e-2, rows[-1]
    return rows


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


def times(started: float) -> list[dict[str, Any]]:
    found = []
    for hidden in SIZES:
        for cell in ("rnn_tanh", "gru", "lstm"):
            for batch in (4, 1, 8):
                if time.perf_counter() - started > BUDGET_S:
                    return found
                types = (torch.float16, torch.bfloat16, torch.float32)
                dense = {str(t): dense_us(cell, hidden, batch, t) for t in types}
                for density in (0.0, 0.1, 0.3):
                    weight = weight_of(cell, hidden, density)
                    one: dict[str, Any] = {"cell": cell, "hidden": hidden, "batch": batch}
                    one |= {"density": density, "dense_us": dense}
                    try:
                        fast = fast_of(cell, weight, batch, save=False)
                    except CapacityError as error:
                        found.append(one | {"fits": str(error)})
                        continue
                    given = operands(cell, hidden, batch, STEPS)
                    own = step_us(lambda f=fast, g=given: f.forward(*g), STEPS)  # type: ignore[misc]
                    found.append(one | {"us": own, "gain": min(dense.values()) / own})
    return found


def main() -> None:
    argparse.ArgumentParser().parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    started = time.perf_counter()
    torch.manual_seed(0)
    right = correctness()
    found = times(started)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu_sparse_rnn.json").write_text(json.dumps(found, indent=1))
    rows = [
        [f"{f['cell']} {f['hidden']} {f['density']:.0%} batch {f['batch']}",
         f"{f['us']:.2f}" if "us" in f else "does not fit", f"{min(f['dense_us'].values()):.2f}",
         f"{f['gain']:.2f}" if "gain" in f else ""]
        for f in found
    ]  # fmt: skip
    verdicts = []
    for (cell, hidden, density), aim in AIMS.items():
        for f in found:
            if (f["cell"], f["hidden"], f["density"], f["batch"]) == (cell, hidden, density, 4):
                gain = f.get("gain", 0.0)
                name = f"{cell} {hidden} {density:.0%}"
                verdicts.append(f"{name}: {gain:.2f} of {aim:g}")
    body = (
        f"{torch.cuda.get_device_name(0)}\n\n"
        f"{table(['cell', 'forward, relative', 'backward, relative'], right)}\n\n"
        f"{table(['cell', 'us a step', 'torch.nn, best type', 'gain'], rows)}\n\n"
        f"Density 0 is the floor. Aims: {'; '.join(verdicts)}."
    )
    report("gpu_sparse_rnn", "Sparse recurrences on a GPU", body)


if __name__ == "__main__":
    main()
