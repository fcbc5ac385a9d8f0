"""The time to choose what to recompute, against PyTorch's partitioner, by number of layers.

    python benchmarks/recompute_planning.py [--layers 12 48 128]

GPT blocks (hidden 64, no dropout, float32), half of the bytes that each keeps without a budget
(PyTorch's way with ``activation_memory_budget=1``). "torch" is the time within
``min_cut_rematerialization_partition`` at 0.5, called by ``torch.compile``; "graphpar" that of the
pass choose-recompute. What comes before, tracing and AOTAutograd, is not counted, on either side.
"of budget" are the bytes that a plan keeps over those that it may. PyTorch's time grows faster
than the layers, and tracing takes some times as long again: where the square of the number of
layers lets expect more than ``--limit`` seconds, it is left out and the table says so.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _common import report, table
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from graphpar.cost import SavedTensors, dry_run
from graphpar.passes.choose_recompute import ChooseRecompute, choose_recompute
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.trace import trace

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.paper_gpt import Layer, Size

SIZE = Size(a=4, b=2, h=64, l=1, s=64, t=1)
SHARE = 0.5


def stack(layers: int) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(*(Layer(SIZE, dropout=0.0) for _ in range(layers)))
    return model, torch.randn(SIZE.s, SIZE.b, SIZE.h, requires_grad=True)


def of_torch(layers: int) -> tuple[float, float]:
    """(Seconds in the partitioner, kept bytes over the budget's)."""
    model, x = stack(layers)
    seconds = 0.0

    def partition(*args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        started = time.perf_counter()
        result = min_cut_rematerialization_partition(*args, **kwargs)
        seconds = time.perf_counter() - started
        return result

    def run(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def kept(share: float) -> int:
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
        compiled = torch.compile(model, backend=backend)
        with functorch_config.patch(activation_memory_budget=share):
            with SavedTensors(model.parameters()) as saved:
                y = compiled(x)
            nbytes = saved.nbytes
            y.sum().backward()
        return nbytes

    most = kept(1.0)
    share = kept(SHARE) / (SHARE * most)
    return seconds, share


def ours(layers: int) -> tuple[float, float]:
    """The same of the pass; its budget is for state and transients too."""
    model, x = stack(layers)
    program = list(run_pipeline(trace(model, (x,)), default_pipeline(tp=1)).values())[-1]
    state_bytes = 4 * sum(p.nbytes for p in model.parameters())
    budget = round(SHARE * dry_run(program).saved_bytes) + state_bytes
    started = time.perf_counter()
    planned = choose_recompute(program, ChooseRecompute(mode="auto", budget_bytes=budget))
    seconds = time.perf_counter() - started
    found = planned.report["recompute"]
    return seconds, (found.saved_bytes + found.transient_bytes) / (budget - state_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning time against PyTorch's partitioner")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48, 128])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds; see above")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    rows: list[list[object]] = []
    known: list[tuple[int, float]] = []  # layers, seconds in PyTorch's partitioner
    for layers in options.layers:
        mine, share = ours(layers)
        row = [f"{layers}", f"{mine:.2f} s", f"{share:.1%}"]
        guess = known[-1][1] * (layers / known[-1][0]) ** 2 if known else 0.0
        if guess > options.limit:
            row += [f"left out (over {options.limit:.0f} s)", ""]
        else:
            theirs, their_share = of_torch(layers)
            known.append((layers, theirs))
            row += [f"{theirs:.2f} s", f"{their_share:.1%}"]
        rows.append(row)
    head = ["layers", "graphpar", "of budget", "torch", "of budget"]
    report("recompute_planning", "Time to choose what to recompute", table(head, rows))


if __name__ == "__main__":
    main()
