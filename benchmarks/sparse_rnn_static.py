"""Sparse recurrences without a GPU: what fits on chip, and the modelled time of a step.

    python benchmarks/sparse_rnn_static.py

Random patterns with the given density. The first table is of plans: they count non-zeros. The
second compiles the kernels of H = 2304, batch 4, and reads their machine code; wavefronts are those
of the bank model for the packed weights. The third searches the largest hidden size that fits, for
inference and for training, whose backward exchanges all gates, and compares it with that of a dense
persistent kernel, whose weights take 2 bytes in the same registers and shared memory. All times are
a model's, unverified on hardware.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from _common import report, table

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.compile import compile_all, fast_order
from graphpar.codegen.sparse_rnn.devices import Device, device_of
from graphpar.codegen.sparse_rnn.emit import write
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.pack import pack
from graphpar.codegen.sparse_rnn.plan import Plan, plan_kernel
from graphpar.codegen.sparse_rnn.spec import PartName
from graphpar.codegen.sparse_rnn.static_checks import check
from graphpar.errors import CapacityError

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
SIZES = (1152, 1792, 2304, 3072, 4096, 5632)
DENSITIES = (0.01, 0.05, 0.1, 0.3)
BATCHES = (1, 4, 8)
ARCHS = ("sm_80", "sm_90")
COMPILED_SIZE, COMPILED_BATCH = 2304, 4
USES: dict[str, tuple[PartName, ...]] = {
    "inference": ("forward",),
    "training": ("forward", "backward"),
}
PAPER = 5.0
"""Models this many times as large fit on chip, says the abstract of Zhu et al. 2018."""


def planned(
    cell: str,
    hidden: int,
    density: float,
    batch: int,
    device: Device,
    part: PartName = "forward",
) -> Plan | None:
    generator = np.random.default_rng(0)
    gates = cell_of(cell).gates
    rows, columns = (gates, hidden), hidden
    if part == "backward":
        rows, columns = (1, hidden), gates * hidden
    counts = generator.binomial(columns, density, rows)
    try:
        return plan_kernel(cell, counts, columns, batch=batch, device=device, part=part)
    except CapacityError:
        return None


def plans() -> str:
    rows = []
    for arch in ARCHS:
        for cell in CELLS[1:]:  # tanh and relu have the same plans
            for hidden in SIZES:
                for density in DENSITIES:
                    cells = [f"{arch} {cell.removesuffix('_relu')} {hidden} {density:.0%}"]
                    found = [planned(cell, hidden, density, b, device_of(arch)) for b in BATCHES]
                    one = found[1]
                    if one is None:
                        cells += ["no"] + [""] * 5
                    else:
                        cells += ["yes", f"{one.warps}", f"{one.depth}"]
                        cells += [f"{one.shared_words}", f"{one.shared_bytes / 1024:.0f}"]
                        parts = one.parts_us.values()
                        cells.append(" + ".join(f"{us:.2f}" for us in parts))
                    cells += ["" if p is None else f"{p.step_us:.2f}" for p in found]
                    cells += ["" if p is None else f"{p.speedup:.1f}" for p in found]
                    rows.append(cells)
    head = ["arch, cell, H, density", "fits", "warps", "KT", "KT shared", "KB",
            "gather + fixed + exchange, us"]  # fmt: skip
    head += [f"us, batch {b}" for b in BATCHES] + [f"gain, batch {b}" for b in BATCHES]
    return table(head, rows)


def compiled(folder: Path) -> str:
    chosen = []
    for arch in ARCHS:
        for cell in CELLS:
            for density in DENSITIES:
                plan = planned(cell, COMPILED_SIZE, density, COMPILED_BATCH, device_of(arch))
                if plan is not None:
                    chosen.append((arch, density, plan, FastSpec.of(plan)))
    orders = [fast_order(s, write(emit_fast(s), folder), arch=a) for a, _, _, s in chosen]
    rows, gathered = [], dict[tuple[str, float, int, int], float]()
    for (arch, density, plan, spec), found in zip(chosen, compile_all(orders), strict=True):
        facts = check(spec, found)
        key = (str(spec.cell.gates), density, plan.programs, plan.warps)
        if key not in gathered:
            gathered[key] = wavefronts(plan, density)
        rows.append([
            f"{arch} {plan.cell} {density:.0%}", plan.depth, facts.registers,
            f"{facts.shared_bytes / 1024:.0f}", facts.barriers, facts.instructions,
            f"{gathered[key] * facts.gathers * plan.warps:.0f}", f"{plan.step_us:.2f}",
            f"{plan.speedup:.1f}", "; ".join(facts.faults) or "none",
        ])  # fmt: skip
    head = ["arch, cell, density", "KT", "registers", "KB", "barriers", "instructions",
            "wavefronts", "us", "gain", "faults"]  # fmt: skip
    return table(head, rows)


def wavefronts(plan: Plan, density: float) -> float:
    """Per load of a warp, of weights with a random pattern."""
    generator = np.random.default_rng(0)
    shape = cell_of(plan.cell).gates * plan.hidden, plan.hidden
    mask = generator.random(shape, dtype=np.float32) < density
    packed = pack(
        torch.from_numpy(mask.astype(np.float32)),
        gates=cell_of(plan.cell).gates,
        programs=plan.programs,
        threads=plan.block_slots,
        value_type=torch.bfloat16,
    )
    return packed.wavefronts()


def capacity() -> tuple[str, float]:
    """The table, and the least gain in model size at 10% over cells and devices."""
    rows, least = [], float("inf")
    for arch in ARCHS:
        device = device_of(arch)
        for cell in CELLS[1:]:
            gates = cell_of(cell).gates
            on_chip = device.multiprocessors * (0.75 * 4 * device.registers + device.shared_bytes)
            dense = int((on_chip / (2 * gates)) ** 0.5)
            for use, parts in USES.items():
                sizes = [
                    min(largest(cell, density, device, part) for part in parts)
                    for density in DENSITIES
                ]
                gains = [(size / dense) ** 2 for size in sizes]
                if use == "inference":
                    least = min(least, gains[DENSITIES.index(0.1)])
                found = [f"{s} ({g:.1f}x)" for s, g in zip(sizes, gains, strict=True)]
                name = cell.removesuffix("_relu")
                rows.append([f"{arch} {name} {use}", dense, *found])
    head = ["arch, cell, use", "dense H", *(f"H at {d:.0%} (weights)" for d in DENSITIES)]
    return table(head, rows), least


def largest(cell: str, density: float, device: Device, part: PartName) -> int:
    """The largest hidden size, in steps of 64, that fits at batch 4."""
    low, high = 1, 512
    while high - low > 1:
        middle = (low + high) // 2
        if planned(cell, 64 * middle, density, 4, device, part) is None:
            high = middle
        else:
            low = middle
    return 64 * low


def main() -> None:
    argparse.ArgumentParser().parse_args()
    torch.set_num_threads(1)
    sizes, least = capacity()
    verdict = "met" if least >= PAPER else "missed"
    with TemporaryDirectory() as folder:
        machine_code = compiled(Path(folder))
    body = (
        f"## Plans\n\n{plans()}\n\n"
        f"## Machine code, H = {COMPILED_SIZE}, batch {COMPILED_BATCH}\n\n{machine_code}\n\n"
        f"## Largest hidden size, batch 4\n\n{sizes}\n\n"
        f"In brackets: how many times the weights of the dense kernel's largest model. The paper: "
        f"over {PAPER:g} times; the least here at 10% for inference is {least:.1f}: {verdict}."
    )
    report("sparse_rnn_static", "Sparse recurrences on chip (modelled)", body)


if __name__ == "__main__":
    main()
