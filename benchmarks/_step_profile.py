"""Where a step's time goes, by kind, as torch's profiler has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from _train_models import Variant
from torch.profiler import ProfilerActivity, profile, record_function

KINDS = (
    "products",
    "other ops",
    "layout copies",
    "collectives",
    "optimizer",
    "Python and autograd",
)
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul")
_COPIES = ("copy_", "clone", "contiguous", "cat", "_to_copy")
_STEPS = 5


def profiled(variant: Variant, barrier: Callable[[], object]) -> dict[str, dict[str, float]]:
    """ms and calls of each kind in a step, by the default optimizer. What no op accounts for is
    Python's and autograd's. Waiting for other ranks counts as collectives, but by hand, where it
    is no op, as Python."""
    milliseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for _ in range(_STEPS):
        for name, run in _phases(variant):
            barrier()
            with profile(activities=[ProfilerActivity.CPU]) as found, record_function("the whole"):
                run()
            for event in found.key_averages():
                kind = _kind(event.key) if name == "backward" else "optimizer"
                if event.key.startswith("gloo:"):  # beside the main thread
                    continue
                milliseconds[kind] += event.self_cpu_time_total / 1000
                calls[kind] += event.count if "::" in event.key else 0
    return {k: {"ms": milliseconds[k] / _STEPS, "calls": calls[k] / _STEPS} for k in KINDS}


def _phases(variant: Variant) -> list[tuple[str, Callable[[], Any]]]:
    optimizer = next(iter(variant.optimizers.values()))
    return [
        ("backward", variant.backward),
        ("optimizer", optimizer.step),
        ("optimizer", variant.model.zero_grad),
    ]


def _kind(name: str) -> str:
    space, _, op = name.partition("::")
    if space in ("c10d", "_c10d_functional"):
        return "collectives"
    if space != "aten":
        return "Python and autograd"
    if op in _PRODUCTS or "attention" in op:
        return "products"
    return "layout copies" if op in _COPIES else "other ops"
