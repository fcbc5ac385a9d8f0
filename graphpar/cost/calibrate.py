"""This CPU as :class:`~graphpar.cost.hardware.Hardware`, by a short calibration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

from graphpar.cost.hardware import Hardware, Link, WireProtocol
from graphpar.ops.host_mask import host_mask


def calibrate_cpu(*, seconds: float = 0.3) -> Hardware:
    """Measure matrix products, copies, random numbers and a small op, in about ``seconds``.

    Each figure is the best of the runs that fit in its share of the time. Links are taken to be
    copies through memory, one after the other.
    """
    n = 384
    share = seconds / 7
    rates = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a = torch.ones(n, n, dtype=dtype)
        rates[dtype] = 2 * n**3 / _best_us(partial(torch.mm, a, a), share)
    rates[torch.float16] = rates[torch.bfloat16]
    source, target = torch.ones(2**22), torch.empty(2**22)
    bandwidth = 2 * source.nbytes / _best_us(partial(target.copy_, source), share)
    numbers = torch.empty(2**19)
    of_generator = partial(numbers.bernoulli_, generator=torch.Generator())
    draws = numbers.numel() / _best_us(lambda: of_generator(0.9), share)
    of_counter = partial(host_mask, numbers.shape, 0.9, 1, (0, 0))
    masks = numbers.numel() / _best_us(of_counter, share)
    one = torch.ones(1)
    launch_us = _best_us(partial(one.add_, 1), share)
    wire = WireProtocol(start_us=100.0, step_us=20.0, share=1.0)
    threads = torch.get_num_threads()
    link = Link(
        bytes_per_us=bandwidth / 4, protocols=(wire,), occupies=1 / threads, memory_passes=4
    )
    measured = f"measured, {threads} thread{'s' if threads > 1 else ''}, the best of {share:.2f} s"
    assumed = (
        "assumed: a message is copied twice through memory, by one of the cores, while products "
        "run on the others; latencies of a local socket"
    )
    return Hardware(
        name="cpu",
        flops_per_us=rates,
        matmul_share=1.0,
        memory_bytes_per_us=bandwidth,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        launch_us=launch_us,
        draws_per_us=draws,
        masks_per_us=masks,
        nvlink=link,
        network=link,
        sources={
            "flops_per_us": f"{measured}; products of {n} x {n}; float16 taken as bfloat16",
            "matmul_share": "measured rates are achieved ones",
            "memory_bytes_per_us": f"{measured}; a copy of {source.nbytes} bytes",
            "memory_bytes": "the machine's physical memory",
            "launch_us": f"{measured}; an addition to one number",
            "draws_hide": "no: a pass of its own, in which the processor waits for nothing else",
            "draws_per_us": f"{measured}; bernoulli_ of {numbers.numel()} numbers",
            "masks_per_us": f"{measured}; a mask of {numbers.numel()} numbers",
            "multiprocessors": "not modelled: the measured rates are of whole products",
            "nvlink": assumed,
            "network": assumed,
        },
    )


def _best_us(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best * 1e6
