"""Sparse recurrences without a GPU: what fits on chip, and the modelled time of a step.

    python benchmarks/sparse_rnn_static.py [--sizes 2304 4096]

Random patterns with the given density. The first table is of plans: they count non-zeros. The
second compiles the kernels of some sizes at batch 4 and reads their machine code; wavefronts are
those of the bank model for the packed weights. The third searches the largest hidden size that
fits, for inference and for training, whose backward exchanges all gates, and the fourth compiles
what it found. They are compared with two dense persistent kernels, whose weights take 2 bytes:

- the *same kernel*: planned by the same code with half a word for each weight and none for
  its index, so with the same registers, states, slots and sums; a real kernel against a real one;
- the *ideal*: three quarters of the registers and all shared memory hold weights alone, as no
  kernel can that receives states.

All times are a model's, unverified on hardware.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from _common import report, table

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.compile import compile_all, fast_order
from graphpar.codegen.sparse_rnn.devices import DEVICES, Device, device_of
from graphpar.codegen.sparse_rnn.emit import write
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import for_triton
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
BATCH = 4
DENSE = 1.0
USES: dict[str, tuple[PartName, ...]] = {
    "inference": ("forward",),
    "training": ("forward", "backward"),
}
DENSITIES_BY_NAME = {f"{density:.0%}": density for density in DENSITIES}
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
    if density == DENSE:
        counts = np.full(rows, -(-columns // 2))  # two weights in a word
    else:
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
                        cells += ["no"] + [""] * 6
                    else:
                        cells += ["yes", f"{one.warps}", f"{one.shape.segments}", f"{one.words}"]
                        cells += [f"{one.shared_words}", f"{one.shared_bytes / 1024:.0f}"]
                        parts = one.parts_us.values()
                        cells.append(" + ".join(f"{us:.2f}" for us in parts))
                    cells += ["" if p is None else f"{p.step_us:.2f}" for p in found]
                    cells += ["" if p is None else f"{p.speedup:.1f}" for p in found]
                    rows.append(cells)
    head = ["arch, cell, H, density", "fits", "warps", "slots", "KT", "KT shared", "KB",
            "gather + fixed + exchange, us"]  # fmt: skip
    head += [f"us, batch {b}" for b in BATCHES] + [f"gain, batch {b}" for b in BATCHES]
    return table(head, rows)


def compiled(folder: Path, sizes: list[int]) -> str:
    """Forward at all densities; at 10% also backward, and everything for one more device."""
    chosen = []
    for arch, cell, hidden, density in product(DEVICES, CELLS, sizes, DENSITIES):
        for part in USES["training"]:
            if density != 0.1 and (part == "backward" or arch not in ARCHS):
                continue
            plan = planned(cell, hidden, density, BATCH, device_of(arch), part)
            if plan is not None:
                save = part == "backward"
                chosen.append((arch, density, plan, for_triton(FastSpec.of(plan, save=save))))
    orders = [fast_order(s, write(emit_fast(s), folder), arch=a) for a, _, _, s in chosen]
    rows, gathered = [], dict[tuple[object, ...], float]()
    for (arch, density, plan, spec), found in zip(chosen, compile_all(orders), strict=True):
        facts = check(spec, found)
        key = (spec.cell.gates, spec.part, plan.hidden, density, plan.programs, plan.block_slots)
        if key not in gathered:
            gathered[key] = wavefronts(plan, density)
        rows.append([
            f"{arch} {plan.cell} {plan.part} {plan.hidden} {density:.0%}", plan.words,
            facts.registers,
            f"{facts.shared_bytes / 1024:.0f}", facts.barriers, facts.instructions,
            f"{gathered[key] * facts.gathers * plan.warps:.0f}", f"{plan.step_us:.2f}",
            f"{plan.speedup:.1f}", "; ".join(facts.faults) or "none",
        ])  # fmt: skip
    head = ["arch, cell, part, H, density", "KT", "registers", "KB", "barriers", "instructions",
            "wavefronts", "us", "gain", "faults"]  # fmt: skip
    return table(head, rows)


def wavefronts(plan: Plan, density: float) -> float:
    """Per load of a warp, of weights with a random pattern."""
    generator = np.random.default_rng(0)
    gates = cell_of(plan.cell).gates
    shape = (gates * plan.hidden, plan.hidden)
    if plan.part == "backward":
        gates, shape = 1, shape[::-1]
    mask = generator.random(shape, dtype=np.float32) < density
    packed = pack(
        torch.from_numpy(mask.astype(np.float32)),
        gates=gates,
        programs=plan.programs,
        threads=plan.block_slots,
        value_type=torch.bfloat16,
        load_bytes=FastSpec.of(plan).element_bytes,
    )
    return packed.wavefronts(load_bytes=FastSpec.of(plan).element_bytes)


def capacity(folder: Path) -> tuple[str, float]:
    """The tables, and the least gain in model size at 10% over cells and devices."""
    rows, least, winners = [], float("inf"), list[tuple[str, Plan]]()
    for arch in ARCHS:
        device = device_of(arch)
        for cell in CELLS[1:]:
            on_chip = device.multiprocessors * (0.75 * 4 * device.registers + device.shared_bytes)
            ideal = int((on_chip / (2 * cell_of(cell).gates)) ** 0.5)
            for use, parts in USES.items():
                name = f"{arch} {cell.removesuffix('_relu')} {use}"
                dense = min(largest(cell, DENSE, device, part) for part in parts)
                found = []
                for density in DENSITIES:
                    size, part = min((largest(cell, density, device, p), p) for p in parts)
                    plan = planned(cell, size, density, BATCH, device, part)
                    assert plan is not None
                    winners.append((f"{name} {density:.0%}, {part}", plan))
                    gain = (size / dense) ** 2
                    found.append(f"{size} ({gain:.1f}x, {(size / ideal) ** 2:.1f}x)")
                    if use == "inference" and density == 0.1:
                        least = min(least, gain)
                enough = f"{density_for(cell, PAPER, dense, device, parts):.1%}"
                rows.append([name, dense, ideal, *found, enough])
    head = ["arch, cell, use", "same kernel, dense", "ideal dense",
            *(f"H at {d:.0%}" for d in DENSITIES), f"density for {PAPER:g}x"]  # fmt: skip
    return f"{table(head, rows)}\n\n{proofs(winners, folder)}", least


def largest(cell: str, density: float, device: Device, part: PartName) -> int:
    """The largest hidden size, in steps of 64, that fits at batch 4."""
    low, high = 1, 512
    while high - low > 1:
        middle = (low + high) // 2
        if planned(cell, 64 * middle, density, BATCH, device, part) is None:
            high = middle
        else:
            low = middle
    return 64 * low


def density_for(
    cell: str, gain: float, dense: int, device: Device, parts: tuple[PartName, ...]
) -> float:
    """The highest density, in steps of a tenth of a percent, with which a model of ``gain`` times
    the weights of a dense one of size ``dense`` fits."""
    hidden = -(-int(dense * gain**0.5) // 64) * 64
    low, high = 0, 300
    while high - low > 1:
        middle = (low + high) // 2
        if any(planned(cell, hidden, middle / 1000, BATCH, device, p) is None for p in parts):
            high = middle
        else:
            low = middle
    return low / 1000


def proofs(winners: list[tuple[str, Plan]], folder: Path) -> str:
    """What static checks find in the kernels of the largest sizes."""
    rows = []
    for name, plan in winners:
        spec = for_triton(FastSpec.of(plan, save="training" in name))
        order = fast_order(spec, write(emit_fast(spec), folder), arch=plan.device.arch)
        (found,) = compile_all([order])
        facts = check(spec, found)
        print(name, plan.hidden, "; ".join(facts.faults) or "no faults", flush=True)
        nonzeros = DENSITIES_BY_NAME[name.split()[3].rstrip(",")] * plan.hidden**2
        nonzeros *= cell_of(plan.cell).gates
        fill = nonzeros / (plan.programs * plan.block_slots * plan.depth)
        rows.append([
            f"{name} {plan.hidden}", spec.batch, plan.warps, plan.shape.segments,
            "yes" if plan.shape.frugal else "no", plan.register_words, plan.shared_words,
            f"{fill:.2f}", facts.registers, f"{facts.shared_bytes / 1024:.0f}", facts.barriers,
            facts.instructions, f"{plan.step_us:.1f}", f"{plan.speedup:.1f}",
            "; ".join(facts.faults) or "none",
        ])  # fmt: skip
    head = ["arch, cell, use, density, part, H", "columns", "warps", "slots of a thread", "frugal",
            "words in registers", "in shared memory", "full", "registers", "KB", "barriers",
            "instructions", "us, batch 4", "gain", "faults"]  # fmt: skip
    return f"Their machine code:\n\n{table(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[2304], help="to compile")
    sizes = parser.parse_args().sizes
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        largest_sizes, least = capacity(Path(folder))
        machine_code = compiled(Path(folder), sizes)
    verdict = "met" if least >= PAPER else "missed"
    body = (
        f"## Plans\n\nKT: non-zeros of a thread, in so many slots.\n\n{plans()}\n\n"
        f"## Machine code, batch {BATCH}\n\n{machine_code}\n\n"
        f"## Largest hidden size, batch {BATCH}\n\n{largest_sizes}\n\n"
        f"In brackets: how many times the weights of the largest model of the same kernel for "
        f"dense weights, and of the ideal one. A non-zero takes 4 bytes and a dense weight 2, so a "
        f"density of d gives at most 1 / 2d times the weights in the same memory: 5.0 times at "
        f"10%. The paper: over {PAPER:g} times, without a density in its abstract; the least here "
        f"at 10% for inference against the same kernel is {least:.1f}: {verdict}. "
        f"The last column is the highest density with which {PAPER:g} times fits."
    )
    report("sparse_rnn_static", "Sparse recurrences on chip (modelled)", body)


if __name__ == "__main__":
    main()
