"""Our plan in the bytes of the selective recomputation of Korthikanti et al. 2022 (section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from _common import table
from paper_gpt import SIZES, Size, core, name_of

from graphpar.cost import Kernel, Roofline, Times, dry_run
from graphpar.passes.choose_recompute.blocks import curve_of
from graphpar.program import Program


@dataclass(frozen=True, slots=True)
class Fused:
    """Times of a layer whose scale and mask product are part of their neighbours, as in the
    paper's kernels: softmax with scale and mask, one dropout."""

    times: Roofline

    @property
    def sources(self) -> Mapping[str, str]:
        return self.times.sources

    def kernel_us(self, kernel: Kernel) -> float:
        return self._of(kernel, self.times.kernel_us)

    def beside_us(self, kernel: Kernel, collective: Kernel) -> float:
        return self._of(kernel, lambda fused: self.times.beside_us(fused, collective))

    def _of(self, kernel: Kernel, us: Callable[[Kernel], float]) -> float:
        if kernel.op in ("aten.mul", "graphpar.apply_mask"):
            return 0.0
        if kernel.op == "graphpar.dropout_bits":  # the result too: 2 of the 3 bytes once more
            kernel = replace(kernel, bytes_moved=kernel.bytes_moved * 5 // 3)
        return us(kernel)


def own_choice(size: Size, program: Program, times: Times) -> list[str]:
    """What our plan drops in the bytes that the paper's selective recomputation keeps of a layer,
    its time beside that of the paper's choice, and from which bytes on it drops the whole core."""
    steps = dry_run(program).steps
    curve = curve_of([step.block for step in steps if step.block is not None][1], times)
    unit = size.s * size.b * size.h / size.t
    inside = {i for i, node in enumerate(curve.nodes) if name_of(node) in core("per-rank")}
    paper = curve.plan(inside)
    ours = curve.within(curve.kept_bytes(paper))
    assert ours is not None
    dropped = {name_of(node) for node in ours.replay}
    whole = [
        sbh
        for sbh in range(34, int(curve.kept_bytes(curve.none) / unit))
        if (plan := curve.within(int(unit * (sbh + 0.1)))) is not None
        and {name_of(node) for node in plan.replay} >= set(core("per-rank"))
    ]
    return [
        f"{curve.kept_bytes(paper) / unit:.2f} → {curve.kept_bytes(ours) / unit:.2f}",
        f"{paper.replay_us / 1000:.2f} → {ours.replay_us / 1000:.2f}",
        "the core alone" if dropped == set(core("per-rank")) else ", ".join(sorted(dropped)),
        f"{max(whole, default=0)}",
    ]


def choice_table(times: Roofline, stacked: Callable[[Size, bool, bool], Program]) -> str:
    """``stacked`` gives layers of a size with sequence parallelism and overlap, or without."""
    rows = []
    for name, size in SIZES.items():
        program = stacked(size, True, True)
        for kernels, cost in (("PyTorch's", times), ("fused", Fused(times))):
            rows.append([f"{name}, {kernels} kernels", *own_choice(size, program, cost)])
    head = ["model", "kept, sbh/t", "replay, ms", "our plan drops", "whole core up to, sbh/t"]
    return table(head, rows)
