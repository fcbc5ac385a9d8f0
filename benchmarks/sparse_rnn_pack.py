"""Packing of sparse recurrent weights: bank conflicts before and after ordering, and seconds.

    python benchmarks/sparse_rnn_pack.py

Random patterns, bf16 values, hidden size 2304, 132 programs. Wavefronts are those of the model in
codegen/sparse_rnn/banks.py, per load of a warp: of 64 bits 2.0 is ideal, of 32 bits, as for one or
two batch columns, 1.0. "before" leaves the non-zeros of a row in the order of their columns;
"random" shuffles all columns.
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
LIMITS = {0.3: 2.4, 0.1: 3.0}  # of 64 bits; half of it for 32
FORMS = ((256, 8), (512, 8), (1024, 8), (1024, 4))  # slots of a block, bytes of a load
SECONDS_LIMIT = 3.0
CELLS = {"RNN": 1, "GRU": 3, "LSTM": 4}


def weight_of(gates: int, density: float) -> Tensor:
    generator = np.random.default_rng(0)
    shape = gates * HIDDEN, HIDDEN
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= generator.random(shape, dtype=np.float32) < density
    return torch.from_numpy(values).bfloat16()


def packed(
    weight: Tensor, gates: int, threads: int, load_bytes: int, *, bank_aware: bool
) -> Packed:
    return pack(
        weight,
        gates=gates,
        programs=PROGRAMS,
        threads=threads,
        value_type=torch.bfloat16,
        load_bytes=load_bytes,
        bank_aware=bank_aware,
    )


def main() -> None:
    torch.set_num_threads(1)
    rows, missed = [], []
    for density, limit in LIMITS.items():
        for cell, gates in CELLS.items():
            for threads, load_bytes in FORMS:
                weight = weight_of(gates, density)
                before = packed(weight, gates, threads, load_bytes, bank_aware=False)
                started = time.process_time()
                after = packed(weight, gates, threads, load_bytes, bank_aware=True)
                seconds = time.process_time() - started
                started = time.process_time()
                assert repack(after, weight)
                again = time.process_time() - started
                assert torch.equal(after.dense(), weight)
                mixed = np.random.default_rng(1).permutation(after.columns.numpy().reshape(-1))
                chance = wavefronts_per_load(
                    mixed.reshape(after.columns.shape), load_bytes=load_bytes
                )
                fill = float((~after.padding).double().mean())
                name = f"{cell} {density:.0%} {threads} {8 * load_bytes}"
                waves = [each.wavefronts(load_bytes=load_bytes) for each in (before, after)]
                figures = [chance, *waves, seconds, again]
                rows.append(
                    [name, after.layout.depth, f"{fill:.2f}", *(f"{f:.2f}" for f in figures)]
                )
                if waves[1] > limit * load_bytes / 8 or seconds > SECONDS_LIMIT:
                    missed.append(name)
    head = [
        "cell, density, slots, bits", "KT", "fill", "random", "before", "after", "pack, s",
        "repack, s",
    ]  # fmt: skip
    verdict = f"missed by {', '.join(missed)}" if missed else "met"
    body = (
        f"{table(head, rows)}\n\nTargets: at most 2.4 wavefronts at 30% and 3.0 at 10% for "
        f"64 bits, half of that for 32, {SECONDS_LIMIT:g} s of one core; {verdict}."
    )
    report("sparse_rnn_pack", f"Packing of sparse recurrent weights, H = {HIDDEN}", body)


if __name__ == "__main__":
    main()
