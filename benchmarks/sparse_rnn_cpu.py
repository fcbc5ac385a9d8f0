"""The op sparse_rnn off a GPU against torch.nn: time of a sequence, and the ratio.

    python benchmarks/sparse_rnn_cpu.py

One layer, float32, one thread, a sequence of 32 steps with an input of the hidden size, forward
alone under ``torch.no_grad``, random patterns. Both run interleaved; the times are medians, and
the ratio is the median of the ratios of runs side by side. Both include the input's product.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _common import report, table
from torch import Tensor, nn

from graphpar.codegen.sparse_rnn.recurrence import sparse_rnn

STEPS = 32
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
FASTER_AT = (0.05, 0.1)
"""Densities at which batch 1 is to be faster than dense."""


def runs(cell: str, hidden: int, density: float, batch: int) -> list[Callable[[], Any]]:
    """torch's and ours, on the same weights and input."""
    torch.manual_seed(0)
    module: Any = CELLS[cell](hidden, hidden)
    with torch.no_grad():
        module.weight_hh_l0.mul_(torch.rand_like(module.weight_hh_l0) < density)
    x = torch.randn(STEPS, batch, hidden)
    h, c = torch.zeros(batch, hidden), torch.zeros(batch, hidden)

    def ours() -> Tensor:
        gates = F.linear(x, module.weight_ih_l0, module.bias_ih_l0)
        state = c if cell == "lstm" else None
        return sparse_rnn(gates, module.weight_hh_l0, module.bias_hh_l0, None, h, state, cell)[0]

    return [lambda: module(x)[0], ours]


def measure(pair: list[Callable[[], Any]], repeats: int) -> tuple[list[float], float]:
    """Median seconds of each, and the median ratio of ours to torch's."""
    dense, ours = (run() for run in pair)
    torch.testing.assert_close(ours, dense, atol=1e-4, rtol=1e-4)
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for place, run in enumerate(pair):
            started = time.perf_counter()
            run()
            seconds[place].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    return [statistics.median(s) for s in seconds], statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, missed = [], []
    with torch.no_grad():
        for cell in CELLS:
            for hidden in (1024, 2304):
                for density in (0.05, 0.1, 0.3):
                    for batch in (1, 4):
                        pair = runs(cell, hidden, density, batch)
                        (dense, ours), ratio = measure(pair, options.repeats)
                        name = f"{cell} {hidden} {density:.0%} batch {batch}"
                        rows.append(
                            [name, f"{1e3 * dense:.1f}", f"{1e3 * ours:.1f}", f"{ratio:.2f}"]
                        )
                        if batch == 1 and density in FASTER_AT and ratio >= 1:
                            missed.append(name)
    head = ["cell, H, density, batch", "torch.nn, ms", "sparse_rnn, ms", "ratio"]
    verdict = f"missed by {', '.join(missed)}" if missed else "met"
    body = f"{table(head, rows)}\n\nTarget: faster than dense at 5 and 10%, batch 1; {verdict}."
    report("sparse_rnn_cpu", f"Sparse recurrences on the CPU, {STEPS} steps", body)


if __name__ == "__main__":
    main()
