"""Forward and backward of dropout: graphpar's masks against torch's own op.

    python benchmarks/dropout.py

One rank, a whole [2048, 1024] float32 tensor, p=0.1, one thread. "invariant" makes the mask from a
counter in forward and again in backward and keeps none; "per-rank" draws it from a generator with
a seed and keeps it. All variants run interleaved, in changing order; the times are medians, and
the ratio is the median of the ratios of runs side by side.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _common import report, table
from torch import Tensor

from graphpar import ops

SHAPE = 2048, 1024
P = 0.1
TARGET = 3.0


def variants() -> dict[str, Callable[[Tensor], Tensor]]:
    seed = ops.draw_seed(torch.device("cpu"))
    return {
        "torch": lambda x: F.dropout(x, P),
        "invariant": lambda x: ops.seeded_dropout(x, seed, P, 0),
        "per-rank": lambda x: ops.rank_dropout(x, seed, P, 0),
    }


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant's runs; the first runs are left out."""
    x, grad = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    seconds: dict[str, list[float]] = {name: [] for name in variants()}
    order = list(variants().items())
    for _ in range(repeats + 2):
        random.shuffle(order)
        for name, drop in order:
            x.grad = None
            started = time.perf_counter()
            drop(x).backward(grad)
            seconds[name].append(time.perf_counter() - started)
    return {name: times[2:] for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    seconds = measure(options.repeats)
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["torch"], strict=True)]
        ms = 1e3 * statistics.median(times)
        rows.append([name, f"{ms:.1f}", f"{statistics.median(ratios):.2f}"])
    head = ["masks", "forward + backward, ms", "ratio to torch"]
    worst = max(float(row[2]) for row in rows)
    verdict = "met" if worst <= TARGET else "missed"
    body = f"{table(head, rows)}\n\nTarget: a ratio of at most {TARGET:g}; {verdict}."
    report("dropout", f"Dropout of {list(SHAPE)} float32, p={P}", body)


if __name__ == "__main__":
    main()
