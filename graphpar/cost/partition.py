"""What an op and a collective cost, in microseconds.

A :class:`CostModel` is an argument of the planner, so that tests can pass constants. Costs
depend on sizes only: every rank computes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphpar.types import CONVERSIONS, Type, letter


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A roofline and an alpha-beta model of one device and its links.

    The defaults are the data-sheet figures of an H100 SXM (bf16 dense rate, HBM3 bandwidth,
    NVLink bandwidth per direction) at about half of peak, and a usual NCCL latency.
    """

    flops_per_us: float = 450e6
    memory_bytes_per_us: float = 2.4e6
    link_bytes_per_us: float = 220e3
    latency_us: float = 5.0
    saved_us_per_byte: float = 1e-7

    def op_us(self, flops: int, nbytes: int) -> float:
        """Forward and backward of one op: three times its forward work."""
        work = 3 * max(flops / self.flops_per_us, nbytes / self.memory_bytes_per_us)
        return work + self.saved_us_per_byte * nbytes

    def collective_us(self, kind: str, nbytes: int, ranks: int) -> float:
        """One ring collective over a tensor whose whole value has ``nbytes``."""
        if not kind or ranks == 1:
            return 0.0
        share = (ranks - 1) / ranks
        once = self.latency_us + share * nbytes / self.link_bytes_per_us
        return {
            "all_reduce": 2 * once,
            "all_to_all": self.latency_us + share * nbytes / ranks / self.link_bytes_per_us,
        }.get(kind, once)

    def conversion_us(
        self, source: Type, target: Type, nbytes: int, ranks: int, *, differentiable: bool
    ) -> float:
        """A conversion in forward and, for a differentiable value, in backward."""
        forward, backward = CONVERSIONS[letter(source), letter(target)]
        cost = self.collective_us(forward, nbytes, ranks)
        if differentiable:
            cost += self.collective_us(backward, nbytes, ranks)
        return cost


_CONTRACTIONS = {
    *(
        f"aten::{name}"
        for name in (
            "linear", "addmm", "mm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "matmul",
            "einsum", "conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention",
            "_grouped_mm",
        )
    ),
    "transformers::grouped_mm_fallback",
}  # fmt: skip


def is_contraction(target: object) -> bool:
    """Whether the op multiplies and sums: where tensor parallelism splits the work."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in _CONTRACTIONS
