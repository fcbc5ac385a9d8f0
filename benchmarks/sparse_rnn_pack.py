"""Packing of sparse recurrent weights: bank conflicts before and after ordering, and seconds.

    python benchmarks/sparse_rnn_pack.py

Random patterns, bf16 values, hidden size 2304, 132 programs. Wavefronts are those of the model in
codegen/sparse_rnn/banks.py, per 64-bit load of a warp: 2.0 is ideal. "before" leaves the
non-zeros of a row in the order of their columns; "random" shuffles all columns.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from _common import report, table
from torch import Tensor

from graphpar.codegen.sparse_rnn.banks import wavefronts_per_load
from graphpar.codegen.sparse_rnn.pack import Packed, pack, repack

HIDDEN, PROGRAMS = 2304, 132
LIMITS = {0.3: 2.4, 0.1: 3.0}
SECONDS_LIMIT = 3.0
CELLS = {"RNN": 1, "GRU": 3, "LSTM": 4}


def weight_of(gates: int, density: float) -> Tensor:
    generator = np.random.default_rng(0)
    shape = gates * HIDDEN, HIDDEN
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= generator.random(shape, dtype=np.float32) < density
    return torch.from_numpy(values).bfloat16()


def packed(weight: Tensor, gates: int, threads: int, *, bank_aware: bool) -> Packed:
    return pack(
        weight,
        gates=gates,
        programs=PROGRAMS,
        threads=threads,
        value_type=torch.bfloat16,
        bank_aware=bank_aware,
    )


def main() -> None:
    torch.set_num_threads(1)
    rows, missed = [], []
    for density, limit in LIMITS.items():
        for cell, gates in CELLS.items():
            for threads in (256, 512):
                weight = weight_of(gates, density)
                before = packed(weight, gates, threads, bank_aware=False)
                started = time.process_time()
                after = packed(weight, gates, threads, bank_aware=True)
                seconds = time.process_time() - started
                started = time.process_time()
                assert repack(after, weight)
                again = time.process_time() - started
                assert torch.equal(after.dense(), weight)
                mixed = np.random.default_rng(1).permutation(after.columns.numpy().reshape(-1))
                chance = wavefronts_per_load(mixed.reshape(after.columns.shape))
                fill = float((~after.padding).double().mean())
                name = f"{cell} {density:.0%} {threads}"
                figures = [chance, before.wavefronts(), after.wavefronts(), seconds, again]
                rows.append(
                    [name, after.layout.depth, f"{fill:.2f}", *(f"{f:.2f}" for f in figures)]
                )
                if figures[2] > limit or seconds > SECONDS_LIMIT:
                    missed.append(name)
    head = [
        "cell, density, threads", "KT", "fill", "random", "before", "after", "pack, s", "repack, s",
    ]  # fmt: skip
    verdict = f"missed by {', '.join(missed)}" if missed else "met"
    body = (
        f"{table(head, rows)}\n\nTargets: at most 2.4 wavefronts at 30% and 3.0 at 10%, "
        f"{SECONDS_LIMIT:g} s of one core; {verdict}."
    )
    report("sparse_rnn_pack", f"Packing of sparse recurrent weights, H = {HIDDEN}", body)


if __name__ == "__main__":
    main()
