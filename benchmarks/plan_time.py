"""Transform time by stage on the meta device, for Llama-shaped models up to 405B.

    python benchmarks/plan_time.py

One trace of each model; all that follows it is repeated on the same traced program, and each
figure is the median. "module" is what transform does beside tracing and the passes: the module
tree, the parameters, the generated code. The sum of the stages is the whole of transform without
the trace.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from _common import report, table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import graphpar
from graphpar import parallel_module, pipeline
from graphpar.program import Program
from graphpar.trace import trace

PASSES = tuple(pipeline.PASSES)
SOLVER = "annotate-partitions"
MAX_AFTER_S, MAX_SOLVER_S, MAX_LAYER_MS = 3.0, 1.0, 10.0


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama; 128256 tokens, heads of 128, 8 heads of keys and values."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int

    def build(self) -> PreTrainedModel:
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_attention_heads=self.heads,
            num_key_value_heads=8,
            vocab_size=128256,
        )
        with torch.device("meta"):
            return LlamaForCausalLM(config).to(torch.bfloat16)


WIDTHS = {"8B": (4096, 14336, 32), "70B": (8192, 28672, 64), "405B": (16384, 53248, 128)}
SIZES = [
    Size(name, layers, *WIDTHS[name])
    for name, layers in (("8B", 8), ("8B", 32), ("70B", 80), ("405B", 63), ("405B", 126))
]


class Timer:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def transform_traced(model: PreTrainedModel, call: dict[str, Any], program: Program) -> Timer:
    """Time the public transform, with the trace replaced by its known result."""
    timer = Timer()
    run, verify = pipeline.run_pipeline, pipeline.verify

    def observe(step: str, _: Program, seconds: float) -> None:
        timer.seconds[step.partition("{")[0]] = seconds

    def timed_verify(program: Program) -> None:
        with timer("verify"):
            verify(program)

    def timed_run(program: Program, steps: Any) -> dict[str, Program]:
        return run(program, steps, [observe])

    with (
        mock.patch.object(parallel_module.Tracer, "trace", return_value=program),
        mock.patch.object(parallel_module, "run_pipeline", timed_run),
        mock.patch.object(pipeline, "verify", timed_verify),
        timer("total"),
    ):
        cpu = time.process_time()
        graphpar.transform(model, (), call, tp=8, sp=True)
        timer.seconds["cpu"] = time.process_time() - cpu
    passes = sum(timer.seconds.get(stage, 0.0) for stage in (*PASSES, "verify"))
    timer.seconds["module"] = timer.seconds["total"] - passes
    return timer


def measure(size: Size, sequence: int, repeats: int) -> dict[str, float]:
    """Median seconds by stage; "trace" is measured once."""
    model = size.build()
    tokens = torch.zeros(1, sequence, dtype=torch.long, device="meta")
    call = {"input_ids": tokens, "use_cache": False}
    start = time.perf_counter()
    program = trace(model, (), call)
    seconds = {"trace": time.perf_counter() - start}
    runs = []
    for _ in range(repeats):
        gc.collect()  # of the former run's programs
        runs.append(transform_traced(model, call, program).seconds)
    for stage in runs[0]:
        seconds[stage] = statistics.median(run[stage] for run in runs)
    return seconds


def per_layer(results: dict[Size, dict[str, float]], width: str, what: str) -> float:
    """Milliseconds after tracing for a further layer, from two depths of one width."""
    low, high = sorted((s for s in results if s.name == width), key=lambda s: s.layers)
    rise = results[high][what] - results[low][what]
    return 1000 * rise / (high.layers - low.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    results = {}
    for size in SIZES:
        results[size] = measure(size, options.sequence, options.repeats)
        print(f"{size.name}, {size.layers} layers: " + str(results[size]), flush=True)

    columns = [f"{size.name} × {size.layers}" for size in results]
    ran = [name for name in PASSES if all(name in seconds for seconds in results.values())]
    stages = ["trace", *ran, "verify", "module", "total", "cpu"]
    names = {
        SOLVER: f"{SOLVER} (solver)",
        "total": "**all after trace**",
        "cpu": "the same, CPU seconds",
    }
    rows = [
        [names.get(stage, stage), *(f"{seconds[stage]:.3f}" for seconds in results.values())]
        for stage in stages
    ]
    # Differences of wall times mean little on a busy machine: CPU seconds stand beside them.
    slopes = {
        f"{name}, {what}": per_layer(results, name, key)
        for name in ("8B", "405B")
        for what, key in (("wall", "total"), ("CPU", "cpu"))
    }
    deepest = max(results, key=lambda size: size.layers)
    after, solver = results[deepest]["total"], results[deepest][SOLVER]
    steepest = max(slopes["8B, CPU"], slopes["405B, CPU"])
    checks = [
        ["all after trace, 126 layers", f"{after:.2f} s", f"{MAX_AFTER_S:.0f} s"],
        ["solver, 126 layers", f"{solver:.2f} s", f"{MAX_SOLVER_S:.0f} s"],
        ["a further identical layer, CPU", f"{steepest:.1f} ms", f"{MAX_LAYER_MS:.0f} ms"],
    ]
    report(
        "plan_time",
        "Transform time by stage",
        f"Seconds, tp=8, sp=True, meta device, {options.sequence} tokens, bfloat16; "
        f"width × layers; medians of {options.repeats} (trace: once).\n\n"
        + table(["stage", *columns], rows)
        + "\n\nAfter tracing, a further identical layer (8 to 32 of 8B, 63 to 126 of 405B) costs "
        + ", ".join(f"{ms:.1f} ms ({what})" for what, ms in slopes.items())
        + ".\n\n"
        + table(["figure", "measured", "target"], checks),
    )


if __name__ == "__main__":
    main()
