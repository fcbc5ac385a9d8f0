"""Memory and time of a training step on two gloo ranks at five budgets, beside the prediction.

    python benchmarks/recompute_ranks.py

A GPT-2 of transformers with dropout, tp=2, sp. "peak" is the most bytes that tensors of rank 0 take
at once in forward and backward, parameters left out: predicted by :mod:`graphpar.memory` without
running anything, and measured by following every storage of the run. "step" is the time over that
without recomputation: predicted from this processor's rates as replay beside three forwards, and
the median of steps that run interleaved in the same processes, one thread each.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import report, table
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

import graphpar
from graphpar.cost import Hardware, calibrate_cpu
from graphpar.memory import LiveBytes, step_memory

RANKS, BUDGETS = 2, 5
MIB = 1 << 20


def build() -> tuple[GPT2LMHeadModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6,
        n_head=8,
        n_embd=256,
        n_positions=256,
        vocab_size=512,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    tokens = torch.randint(512, (8, 256))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def transform(hardware: Hardware, budget: int | None) -> tuple[Any, dict[str, Tensor]]:
    model, example = build()
    options: dict[str, Any] = {"tp": RANKS, "sp": True, "example_kwargs": example}
    if budget is None:
        return graphpar.transform(model, **options, recompute="none"), example
    return graphpar.transform(model, **options, memory_budget=budget, hardware=hardware), example


def budgets(hardware: Hardware) -> list[int | None]:
    """No limit, and budgets that divide the way down to the least that works."""
    model, example = build()
    least = graphpar.transform(
        model, tp=RANKS, sp=True, example_kwargs=example, recompute="full", hardware=hardware
    ).report["recompute"]
    most = least.state_bytes + least.none_bytes
    low = least.state_bytes + least.saved_bytes + least.transient_bytes
    return [None, *(most - (most - low) * i // (BUDGETS - 1) for i in range(1, BUDGETS))]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def worker(
    rank: int, store: str, hardware: Hardware, limits: list[Any], rounds: int, results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    models = [transform(hardware, limit) for limit in limits]
    peaks: list[int] = []
    seconds: list[list[float]] = [[] for _ in models]

    def step(number: int, mode: Any = None) -> None:
        model, example = models[number]
        dist.barrier()
        started = time.perf_counter()
        with mode or contextlib.nullcontext():
            out = model(**example)  # its logits live as long
            out.loss.backward()
        seconds[number].append(time.perf_counter() - started)
        model.zero_grad()

    for number, (model, _) in enumerate(models):
        found = []
        for _ in range(3):  # a thread of gloo's may hold a tensor for a moment longer
            state = [*map(local, model.parameters()), *map(local, model.buffers())]
            live = LiveBytes([*state, *model.program.constants.values()])
            before = live.now
            step(number, live)
            found.append(live.peak - before)
        peaks.append(min(found))
    for each in seconds:
        each.clear()
    order, shuffle = list(range(len(models))), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for number in order:
            step(number)
    if rank == 0:
        results.update(peaks=peaks, seconds=seconds)
    dist.destroy_process_group()


def predictions(hardware: Hardware, limits: list[int | None]) -> list[tuple[int, float, float]]:
    """(Peak and kept bytes, relative time) of each budget."""
    found = []
    for limit in limits:
        model, _ = transform(hardware, limit)
        program = list(model.stages.values())[-1]
        memory = step_memory(program)
        peak = memory.peak_bytes - memory.state_bytes
        plan = model.report.get("recompute")
        ratio = 0.0 if plan is None else plan.replay_us / (3 * plan.forward_us)
        found.append((peak, memory.forward_bytes - memory.state_bytes, ratio))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="of time measurement")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    hardware = calibrate_cpu()
    limits = budgets(hardware)
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        arguments = str(Path(folder, "store")), hardware, limits, rounds, results
        mp.spawn(worker, arguments, nprocs=RANKS)
        measured = dict(results)
    rows = []
    base = measured["seconds"][0]
    for limit, (peak, kept, ratio), real, seconds in zip(
        limits,
        predictions(hardware, limits),
        measured["peaks"],
        measured["seconds"],
        strict=True,
    ):
        slower = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
        rows.append(
            [
                "none" if limit is None else f"{limit / MIB:.1f} MiB",
                f"{kept / MIB:.1f}",
                f"{peak / MIB:.1f}",
                f"{real / MIB:.1f}",
                f"{peak / real - 1:+.2%}",
                f"{ratio:+.1%}",
                f"{slower - 1:+.1%}",
            ]
        )
    head = ["budget", "kept, MiB", "peak", "measured", "off", "step", "measured"]
    report("recompute_ranks", "A step on two ranks at five budgets", table(head, rows))


if __name__ == "__main__":
    main()
