"""Training step of a small Llama on gloo ranks: graphpar, DTensor's plan, by hand, one process.

    python benchmarks/train_step.py [--size small] [--ranks 2] [--part step] [--profile]

A step is forward and backward of the loss, then AdamW, by each of its three implementations. The
peer is the same model of transformers under ``parallelize_module`` with a hand-written plan of
tensor and sequence parallelism, once with the logits gathered for the loss and once with
``loss_parallel``; its ratios are those of the faster. "by hand" is the floor: the same collectives
around local shards, plain parameters, no framework. "one process" is the unmodified model, which
all ranks run at once. All variants run interleaved, in changing order, in the same processes, one
thread each; before that, loss and gradients of each are compared with the one process's.

Part "one" compares the unmodified model with the transformed one for tp=1, part "compile" both
graphpar and the peer under torch.compile (inductor). Each part of each size and number of ranks
has its place in results/train_step.json; a run replaces those it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import RESULTS, machine, table
from _step_profile import KINDS, profiled
from _train_models import (
    FLOOR,
    FLOOR_KEEPS,
    KEEPS,
    ONE,
    OPTIMIZERS,
    OURS,
    PEERS,
    SIZES,
    TOLERANCE,
    Loss,
    Size,
    Variant,
    peer,
    variants,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphpar

PARTS = ("step", "one", "compile")
Section = dict[str, Any]

# --- the parts ------------------------------------------------------------------------------------


def interleaved(runs: Mapping[str, Variant], steps: int, barrier: Callable[[], object]) -> Section:
    """Medians in ms of the parts of a step, by variant; the first two steps are warm-up."""
    order, shuffle = list(runs.values()), random.Random(0).shuffle  # the same on each rank
    for _ in range(steps + 2):
        shuffle(order)
        for variant in order:
            variant.step(barrier)
    return {
        name: {
            kind: {part: 1000 * statistics.median(v[2:]) for part, v in times.items()}
            for kind, times in (("wall", variant.seconds), ("cpu", variant.cpu_seconds))
        }
        for name, variant in runs.items()
    }


def step(size: Size, mesh: DeviceMesh, steps: int, profile: bool) -> Section:
    runs = variants(size, mesh)
    for variant in runs.values():
        variant.check(runs[ONE])
    found: Section = {"times": interleaved(runs, steps, dist.barrier)}
    if profile:
        chosen = (OURS, FLOOR, *PEERS)
        found["profile"] = {name: profiled(runs[name], dist.barrier) for name in chosen}
    return found


def compiled(size: Size, mesh: DeviceMesh, steps: int, profile: bool) -> Section:
    """graphpar must compile to one graph; of the peer, breaks are counted or the error is kept."""
    alone = Variant(Loss(size.build()), size.call())
    ours = graphpar.transform(Loss(size.build()), (), size.call(), tp=mesh.size(), sp=True)
    theirs = peer(size, mesh, gather=True)
    whole = torch.compile(ours, fullgraph=True)
    pair = {
        OURS: Variant(whole, size.call(), optimizers={}),
        "DTensor, gathered logits": Variant(
            torch.compile(theirs.model), theirs.call, optimizers={}
        ),
    }
    breaks: dict[str, object] = {}
    for name, variant in list(pair.items()):
        torch._dynamo.utils.counters.clear()
        try:
            variant.check(alone)
            breaks[name] = sum(torch._dynamo.utils.counters["graph_break"].values())
        except torch._dynamo.exc.TorchDynamoException as error:
            if name == OURS:
                raise
            breaks[name] = f"does not compile ({str(error).splitlines()[0]})"
            del pair[name]
    return {"times": interleaved(pair, steps, dist.barrier), "graph breaks": breaks}


def one(size: Size, steps: int) -> Section:
    call = size.call()
    runs = {
        "unmodified": Variant(Loss(size.build()), call),
        OURS: Variant(graphpar.transform(Loss(size.build()), (), call, tp=1), call),
    }
    runs[OURS].check(runs["unmodified"])
    return {"times": interleaved(runs, steps, lambda: None)}


def worker(rank: int, store: str, ranks: int, jobs: list[tuple[Any, ...]], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    for name, part, steps, profile in jobs:
        run = {"step": step, "compile": compiled}[part]
        found = run(SIZES[name], mesh, steps, profile)
        if rank == 0:
            results[name, part] = found
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> Iterator[tuple[str, str, int, Section]]:
    """(size, part, ranks, what was measured)"""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for part in options.part:
        jobs = [(n, part, options.steps or SIZES[n].steps, options.profile) for n in options.size]
        if part == "one":
            for name, _, steps, _ in jobs:
                yield name, part, 1, one(SIZES[name], steps)
            continue
        with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Manager() as manager:
            results = manager.dict()
            arguments = (str(Path(folder, "store")), options.ranks, jobs, results)
            mp.spawn(worker, arguments, nprocs=options.ranks)
            for (name, _), found in dict(results).items():
                yield name, part, options.ranks, found


# --- ratios ---------------------------------------------------------------------------------------


def total(times: Section, optimizer: str = "", kind: str = "wall") -> float:
    """ms of forward and backward, and of an optimizer if one is named."""
    return times[kind]["backward"] + (times[kind][optimizer] if optimizer else 0.0)


def ratios(part: str, times: Section) -> dict[str, float]:
    """By wall clock, and by the CPU time of a rank's main thread."""
    base = {"step": FLOOR, "one": "unmodified", "compile": ""}[part]
    peers = [name for name in times if name in PEERS]
    found = {}
    for kind in ("wall", "cpu"):
        for optimizer in ("", *(OPTIMIZERS if part != "compile" else ())):
            ours = total(times[OURS], optimizer, kind)
            name = f"{optimizer or 'forward and backward'}, {kind}"
            if base:
                found[f"graphpar / {base}, {name}"] = ours / total(times[base], optimizer, kind)
            if peers:
                best = min(total(times[p], optimizer, kind) for p in peers)
                found[f"DTensor / graphpar, {name}"] = best / ours
    return found


# --- the report -----------------------------------------------------------------------------------


def shown(section: Section) -> str:
    """A section as markdown."""
    times, part, names = section["times"], section["part"], list(section["ratios"])
    columns = ["backward", *(OPTIMIZERS if part != "compile" else ())]
    head = ["step, ms", "forward + backward", *columns[1:], "CPU of a rank's main thread"]
    rows = [
        [name, *(f"{t['wall'][c]:.1f}" for c in columns), f"{t['cpu']['backward']:.1f}"]
        for name, t in times.items()
    ]
    text = f"{section['words']}\n\n{section['date']}. {section['machine']}.\n\n"
    text += table(head, rows) + "\n\n"
    text += table(["ratio", ""], [[name, f"{section['ratios'][name]:.3f}"] for name in names])
    if "graph breaks" in section:
        counts = section["graph breaks"]
        text += "\n\nGraph breaks: " + ", ".join(f"{k} {v}" for k, v in counts.items()) + "."
    for name, kinds in section.get("profile", {}).items():
        rows = [[k, f"{v['ms']:.1f}", f"{v['calls']:.0f}"] for k, v in kinds.items()]
        text += f"\n\n{name}, a step under the profiler (it slows Python most):\n\n"
        text += table(["kind", "ms", "calls"], rows)
    return text


def words(size: Size, part: str, ranks: int) -> str:
    sizes = ", ".join(f"{k} {v}" for k, v in asdict(size).items() if k not in ("target", "steps"))
    what = {
        "step": f"tp={ranks}, sp=True; aims: graphpar at most 1.05 of the floor, "
        f"DTensor at least {size.target} of graphpar",
        "one": "one process, tp=1; aim: at most 1.02",
        "compile": f"tp={ranks}, sp=True, torch.compile (inductor)",
    }[part]
    return f"{sizes}; {what}."


def merged(sections: Mapping[str, Section]) -> dict[str, Section]:
    """What results/train_step.json has, with ``sections`` in place of what it had of them."""
    kept = RESULTS / "train_step.json"
    known: dict[str, Section] = json.loads(kept.read_text()) if kept.exists() else {}
    order = [f"{n}, {p}, {r}" for n in SIZES for p in PARTS for r in (2, 4, 1)]
    found = {**known, **sections}
    return {key: found[key] for key in sorted(found, key=order.index)}


def write(sections: Mapping[str, Section]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "train_step.json").write_text(json.dumps(sections, indent=1) + "\n")
    parts = [f"## {key.capitalize()} ranks\n\n{shown(s)}" for key, s in sections.items()]
    text = (
        "# Training step of a small Llama on gloo ranks\n\nfloat32, one thread a rank; loss and "
        f"gradients of each equal those of one process to {TOLERANCE}. Medians of interleaved "
        f"steps. `{FLOOR_KEEPS}` and `{KEEPS}` are a pair, as `{FLOOR}` and `{OURS}` are.\n\n"
    )
    (RESULTS / "train_step.md").write_text(text + "\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES], action="append", help="default: all")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: step")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--steps", type=int, help="instead of the size's own number")
    parser.add_argument("--profile", action="store_true", help=f"time by kind: {', '.join(KINDS)}")
    parser.add_argument("--json", type=Path, help="a file for the ratios")
    parser.add_argument("--dry", action="store_true", help="print, and keep no results")
    options = parser.parse_args()
    options.size, options.part = options.size or [*SIZES], options.part or ["step"]
    if "compile" in options.part and shutil.which("g++") is None:
        raise SystemExit("part compile: inductor needs g++")
    sections: dict[str, Section] = {}
    for name, part, ranks, found in measure(options):
        section = {
            "part": part,
            "words": words(SIZES[name], part, ranks),
            "date": str(datetime.datetime.now(datetime.UTC).date()),
            "machine": machine(),
            "ratios": ratios(part, found["times"]),
            **found,
        }
        sections[f"{name}, {part}, {ranks}"] = section
        print(f"## {name}, {part}, {ranks}\n\n{shown(section)}\n", flush=True)
    if not options.dry:
        with contextlib.suppress(BrokenPipeError):
            write(merged(sections))
    if options.json is not None:
        options.json.write_text(json.dumps({k: s["ratios"] for k, s in sections.items()}, indent=1))


if __name__ == "__main__":
    main()
