"""Memory of a rank that loads a model from a safetensors file, against loading it whole.

    python benchmarks/load_memory.py

An MLP of 512 MiB of float32 weights, made on the meta device, tp=2 over gloo. "slices" is
``graphpar.load_safetensors``; "whole" reads the file as a state dict and lets
``load_state_dict`` cut it. Anonymous memory (what a rank owns; pages of the file that the system
may drop are not counted), the most that it grew during the load, sampled in the kernel's counters.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import report, table
from safetensors.torch import load_file, save_file
from torch import nn

import graphpar

WIDTH, LAYERS = 2048, 32
MIB = 1 << 20


def build() -> nn.Module:
    """Pairs of a wide and a narrow projection."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS // 2):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()]
        layers += [nn.Linear(WIDTH, WIDTH, bias=False)]
    return nn.Sequential(*layers)


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not tell the anonymous memory")


class Peak(threading.Thread):
    """Samples until it is stopped; ``grown`` is the most that memory grew."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes, self.grown = anonymous(), 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.grown = max(self.grown, anonymous() - self.start_bytes)


def rank_main(rank: int, file: str, variant: str, answers: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    with torch.device("meta"):
        model = build()
    parallel = graphpar.transform(model, (torch.empty(4, WIDTH, device="meta"),), tp=2)
    peak = Peak()
    peak.start()
    if variant == "slices":
        graphpar.load_safetensors(parallel, file)
    else:
        parallel.allocate()
        parallel.load_state_dict(load_file(file))
    peak.done.set()
    peak.join()
    held = sum(t.numel() * t.element_size() for t in parallel.local_tensors().values())
    Path(answers, f"{rank}.json").write_text(json.dumps([peak.grown, held]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "model.safetensors"))
        torch.manual_seed(0)
        save_file(build().state_dict(), file)
        size = Path(file).stat().st_size
        for variant in ("slices", "whole"):
            mp.spawn(rank_main, (file, variant, folder), nprocs=2)  # type: ignore[no-untyped-call]
            found = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(2)]
            grown, held = max(found)
            rows.append([variant, f"{grown / MIB:.0f}", f"{held / MIB:.0f}", f"{grown / held:.2f}"])
    head = ["variant", "peak growth, MiB", "held, MiB", "peak / held"]
    report(
        "load_memory",
        f"A file of {size / MIB:.0f} MiB, two ranks; the larger rank's numbers.",
        table(head, rows),
    )


if __name__ == "__main__":
    main()
