"""What an optimizer holds of each parameter, and moves in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """``states`` it holds and ``traffic`` it reads and writes, as multiples of the bytes of the
    parameters, on top of these and of their gradients."""

    states: int
    traffic: int


ADAMW = Optimizer(states=2, traffic=7)
"""torch's fused AdamW in the parameters' own dtype: parameters, two moments and gradients are read,
the former three written."""

MIXED_ADAM = Optimizer(states=6, traffic=30)
"""Adam on a copy in 32 bits of parameters in 16, as Megatron-LM steps (megatron/optimizer:
Float16OptimizerWithFloat16Params, clip_grads). A copy and two moments of 4 bytes; bytes moved of
each parameter: gradients to 32 bits (2 + 4), unscaled and checked (4 + 4), their norm (4), clipped
(4 + 4), Adam (16 + 12), the copy to 16 bits (4 + 2): 60, which is 30 times 2."""
