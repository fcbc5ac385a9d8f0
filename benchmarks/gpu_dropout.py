"""The kernel of a seeded dropout on a GPU: its bits against torch's ops, its time against torch's.

    python benchmarks/gpu_dropout.py          # without a GPU it says so
    python benchmarks/gpu_dropout.py --dry    # the bits alone, in Triton's interpreter

Times are medians of CUDA events, interleaved; GB/s count the values once in and once out. Nothing
is timed before all bits are right.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from _common import report, table
from torch import Tensor

from graphpar import ops
from graphpar.ops.mask_launch import TYPES, masked_part, runs_here
from graphpar.ops.philox import keep_mask
from graphpar.types import Shard, local_shape

P = 0.1
SEED, STREAM = 2**62 + 12345, (3, 9)
RATES = 0.0, P, 0.5, 1 - 2**-16
DRY_RATES = 0.0, 0.5, 1 - 2**-16  # Triton's interpreter rounds to bfloat16 wrongly
SHAPES = (8192, 12288), (4, 96, 2048, 2048), (8191, 12287)
LAYOUTS: tuple[tuple[tuple[int, ...], int, tuple[int, ...], int, int], ...] = (
    ((70, 33), 0, (), 1, 0),
    ((5, 64, 48), 2, (48,), 3, 0),
    ((2, 48, 9, 31), 1, (16, 32), 2, 0),
    ((33, 75), 1, (75,), 4, 25),
)
WARM, REPEATS = 3, 20


def by_ops(x: Tensor, p: float, *layout: object) -> Tensor:
    """What a GPU without triton runs."""
    mask = keep_mask(x.shape, 1 - p, SEED, STREAM, x.device, *layout)
    return (x * mask).mul_(1 / (1 - p))


def cases(device: torch.device) -> Iterator[tuple[Tensor, tuple[object, ...]]]:
    for dtype in TYPES:
        for shape, dim, blocks, ranks, units in LAYOUTS:
            for rank in range(ranks):
                kind = Shard(dim, blocks, units)
                part = local_shape(shape, kind, rank, ranks) if blocks else shape
                x = torch.randn(part, device=device).to(dtype)
                x.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
                yield x, (dim, blocks, rank, ranks, units)
        yield torch.randn(65, 130, device=device).to(dtype).t()[1:], ()


def same(found: Tensor, expected: Tensor) -> bool:
    nan = expected.isnan()
    bits = (y.masked_fill(nan, 0).contiguous().view(torch.uint8) for y in (found, expected))
    return found.isnan().equal(nan) and torch.equal(*bits)


def check(device: torch.device, rates: tuple[float, ...] = RATES) -> int:
    """How many results were compared; exits if one differs."""
    count = 0
    for x, layout in cases(device):
        for p in rates:
            if not same(masked_part(x, SEED, STREAM, p, *layout), by_ops(x, p, *layout)):
                sys.exit(f"other bits: {x.dtype}, {tuple(x.shape)}, {layout}, p={p}")
            count += 1
    return count


def check_graph() -> None:
    """A captured dropout gives, replayed on other values, what it gives at once."""
    seed, x = torch.tensor([SEED, 1]), torch.randn(64, 48, device="cuda")
    ops.seeded_dropout(x, seed, P, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.seeded_dropout(x, seed, P, 0)
    x.normal_()
    graph.replay()
    if not found.equal(ops.seeded_dropout(x, seed, P, 0)):
        sys.exit("a replayed CUDA graph gives other bits")


def milliseconds(variants: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants.items())
    for _ in range(WARM + REPEATS):
        random.shuffle(order)
        for name, run in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(each[WARM:]) for name, each in times.items()}


def measure() -> list[list[object]]:
    rows: list[list[object]] = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape, device="cuda", dtype=dtype)
            found = milliseconds(
                {
                    "torch": lambda x=x: F.dropout(x, P),
                    "kernel": lambda x=x: masked_part(x, SEED, STREAM, P),
                    "torch's ops": lambda x=x: by_ops(x, P),
                }
            )
            for name, ms in found.items():
                rate = 2 * x.nbytes / ms / 1e6
                row = [f"{list(shape)} {str(dtype).removeprefix('torch.')}", name]
                rows.append([*row, f"{ms:.3f}", f"{rate:.0f}", f"{ms / found['torch']:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The kernel of a seeded dropout on a GPU.")
    parser.add_argument("--dry", action="store_true", help="bits alone, interpreted on the CPU")
    options = parser.parse_args()
    if options.dry:
        if os.environ.get("TRITON_INTERPRET") != "1":  # triton reads it when it is imported
            os.environ["TRITON_INTERPRET"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        count = check(torch.device("cpu"), DRY_RATES)
        print(f"{count} results are equal bit by bit")
        return
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    started = time.perf_counter()
    device = torch.device("cuda", 0)
    if not runs_here(torch.empty(1, device=device)):
        sys.exit("the kernel does not run here")
    count = check(device)
    check_graph()
    head = ["values", "dropout by", "ms", "GB/s", "ratio to torch"]
    name, seconds = torch.cuda.get_device_name(0), time.perf_counter() - started
    body = f"{name}. {count} results are equal bit by bit, after {seconds:.0f} s.\n\n"
    report("gpu_dropout", f"Seeded dropout on a GPU, p={P}", body + table(head, measure()))


if __name__ == "__main__":
    main()
