"""The whole of transform, trace to module, by stage with wall time and peak memory.

    python benchmarks/transform_time.py

Each model in a process of its own, on the meta device: tp=8, sp=True, bfloat16. Peak memory is
that of the whole process, imports among it. At the end, ``graphpar dump`` of the 405B, imports
among it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

SOLVER = "annotate-partitions"
# Layers, hidden, inner, heads, key-value heads, vocabulary, sequence. Llama 3 (Grattafiori et al.
# 2024, table 3); the GPT of a trillion parameters (Korthikanti et al. 2022, table 3).
LLAMA = {
    "Llama 8B": (32, 4096, 14336, 32, 8, 128256, 4096),
    "Llama 70B": (80, 8192, 28672, 64, 8, 128256, 4096),
    "Llama 405B": (126, 16384, 53248, 128, 8, 128256, 4096),
}
GPT = {"GPT 1T": (128, 25600, 102400, 160, 160, 51200, 2048)}
FEWER = {"Llama 405B": 63, "GPT 1T": 64}
"""Layers of the shallower model, from which the cost of a further layer follows."""


def build(name: str, layers: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    _, hidden, inner, heads, kv_heads, vocabulary, tokens = {**LLAMA, **GPT}[name]
    with torch.device("meta"):
        if name in LLAMA:
            llama = LlamaConfig(
                num_hidden_layers=layers,
                hidden_size=hidden,
                intermediate_size=inner,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                vocab_size=vocabulary,
            )
            model = LlamaForCausalLM(llama)
        else:
            gpt = GPT2Config(
                n_layer=layers,
                n_embd=hidden,
                n_inner=inner,
                n_head=heads,
                n_positions=tokens,
                vocab_size=vocabulary,
                bos_token_id=0,
                eos_token_id=0,
            )
            model = GPT2LMHeadModel(gpt)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    return model.to(torch.bfloat16), {"input_ids": ids, "labels": ids, "use_cache": False}


def deepest() -> Any:
    """What ``graphpar dump`` is given here."""
    model, call = build("Llama 405B", LLAMA["Llama 405B"][0])
    return model, (), call


def measure(name: str, layers: int, trace: str) -> dict[str, float]:
    """Seconds by stage, and bytes, in this process."""
    seconds: dict[str, float] = {}

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start

        return run

    start = time.perf_counter()
    import torch  # noqa: F401

    seconds["import torch"] = time.perf_counter() - start
    start = time.perf_counter()
    import graphpar

    seconds["import graphpar"] = time.perf_counter() - start
    model, call = build(name, layers)
    start = time.perf_counter()
    from graphpar import api, parallel_module, pipeline
    from graphpar.trace import symbolic

    seconds["its modules, at first use"] = time.perf_counter() - start
    passes = {each: (timed(each, run), options) for each, (run, options) in pipeline.PASSES.items()}
    with ExitStack() as stack:
        for owner, what in ((symbolic, "export"), (symbolic, "lower"), (pipeline, "verify")):
            patch = mock.patch.object(owner, what, timed(what, getattr(owner, what)))
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(pipeline, "PASSES", passes))
        start, cpu = time.perf_counter(), time.process_time()
        parallel = api.transform(model, (), call, tp=8, sp=True, trace=trace)
        total = time.perf_counter() - start
        seconds["cpu"] = time.process_time() - cpu
    assert isinstance(parallel, graphpar.ParallelModule | parallel_module.ParallelModule)
    known = sum(seconds.get(stage, 0.0) for stage in ("export", "lower", *passes, "verify"))
    seconds |= {"module": total - known, "total": total}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**seconds, "bytes": peak, "folded": len(parallel.report["trace"].folded)}


def in_process(name: str, layers: int, trace: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, str(layers), trace]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    print(f"{name}, {layers} layers, {trace}: {found}", flush=True)
    return found


def dump_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        model = f"{__file__}:deepest"
        command = [sys.executable, "-m", "graphpar", "dump", model, "--tp", "8", "--sp"]
        subprocess.run([*command, "-o", folder], check=True, capture_output=True)
        seconds = time.perf_counter() - start
        print(f"dump: {seconds:.2f} s, {[path.name for path in Path(folder).iterdir()]}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "LAYERS", "TRACE"))
    parser.add_argument("--flat", action="store_true", help="also trace every layer of the 8B")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    options = parser.parse_args()
    if options.one:
        name, layers, trace = options.one
        print(json.dumps(measure(name, int(layers), trace)))
        return
    from _common import report, table, write_json

    shapes = {name: shape[0] for name, shape in {**LLAMA, **GPT}.items()}
    cases = [(name, layers, "once") for name, layers in shapes.items()]
    cases += [(name, layers, "once") for name, layers in FEWER.items()]
    cases += [("Llama 8B", shapes["Llama 8B"], "flat")] if options.flat else []
    load = os.getloadavg()[0]
    found = {case: in_process(*case) for case in cases}
    dump = dump_seconds()

    from graphpar.pipeline import PASSES

    ran = [each for each in PASSES if all(each in seconds for seconds in found.values())]
    stages = ["export", "lower", *ran, "verify", "module", "total", "cpu"]
    names = {"total": "**transform**", "cpu": "the same, CPU seconds", SOLVER: f"{SOLVER} (solver)"}
    columns = [f"{name} × {layers}" + ", flat" * (t == "flat") for name, layers, t in cases]
    rows = [
        [names.get(stage, stage), *(f"{each[stage]:.2f}" for each in found.values())]
        for stage in stages
    ]
    rows.append(["layers folded", *(f"{each['folded']:.0f}" for each in found.values())])
    rows.append(["peak MB", *(f"{each['bytes'] / 1e6:.0f}" for each in found.values())])
    full = {name: found[name, layers, "once"] for name, layers in shapes.items()}
    slopes = {
        f"{name}, {what}": 1000
        * (full[name][key] - found[name, fewer, "once"][key])
        / (shapes[name] - fewer)
        for name, fewer in FEWER.items()
        for what, key in (("wall", "total"), ("CPU", "cpu"))
    }
    slowest = max(full.values(), key=lambda each: each["total"])
    imports = sorted(each["import graphpar"] for each in found.values())
    checks = [
        ["transform, the slowest", f"{slowest['total']:.2f} s", "4 s"],
        ["solver, the slowest", f"{max(e[SOLVER] for e in full.values()):.2f} s", "1 s"],
        ["peak memory", f"{max(e['bytes'] for e in full.values()) / 1e6:.0f} MB", "1500 MB"],
        *([f"a further layer, {k}", f"{ms:.1f} ms", "20 ms"] for k, ms in slopes.items()),
        ["graphpar dump of the 405B", f"{dump:.2f} s", "10 s"],
        ["import graphpar, after torch", f"{imports[len(imports) // 2]:.3f} s", "0.3 s"],
    ]
    columns_of = dict(zip(columns, found.values(), strict=True))
    figures = {figure: {"measured": measured, "aim": aim} for figure, measured, aim in checks}
    write_json(options.json, {"stages": columns_of, "figures": figures})
    report(
        "transform_time",
        "The whole of transform by stage",
        "Seconds of wall time, one run each, in a process of its own; meta device, tp=8, sp=True, "
        f"bfloat16; the machine's load was {load:.1f} before the first.\n\n"
        + table(["stage", *columns], rows)
        + "\n\n"
        + table(["figure", "measured", "aim"], checks),
    )


if __name__ == "__main__":
    main()
