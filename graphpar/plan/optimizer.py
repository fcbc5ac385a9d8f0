"""What an optimizer holds of each parameter, and moves in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpar.cost import is_trained
from graphpar.errors import InputError
from graphpar.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """All as multiples of the bytes of the parameters: ``gradients`` and ``states`` that are held
    beside them; bytes read and written in a step (``traffic``), and to add the gradients of a
    microbatch to those before (``adding``), with ``adds_first`` those of the first too, to zeros.

    ``itemsize`` are the bytes of a parameter that it is for (0: any), ``told`` is what it does.
    """

    name: str
    gradients: int
    states: int
    traffic: int
    adding: int
    adds_first: bool = False
    itemsize: int = 0
    told: str

    def check(self, program: Program) -> None:
        """Whether it can step the program's parameters.

        Raises:
            InputError: a parameter is of another size.
        """
        for name, state in program.state.items():
            if self.itemsize and is_trained(state) and state.spec.dtype.itemsize != self.itemsize:
                raise InputError(
                    f"optimizer {self.name!r} is for parameters of {8 * self.itemsize} bits, but "
                    f"{name} is {str(state.spec.dtype).removeprefix('torch.')}"
                )


ADAMW = Optimizer(
    name="adamw",
    gradients=1,
    states=2,
    traffic=7,
    adding=3,
    told="AdamW in the parameters' own type; gradients, added up in it, and two moments",
)
"""torch's fused AdamW: parameters, two moments and gradients are read, the former three written."""

MIXED_ADAM = Optimizer(
    name="mixed-adam",
    gradients=2,
    states=6,
    traffic=29,
    adding=5,
    adds_first=True,
    itemsize=2,
    told="Adam in 32 bits on parameters in 16; gradients added up in 32, a copy and two moments",
)
"""As Megatron-LM steps with bfloat16, which has no loss scale (megatron/arguments.py:
accumulate_allreduce_grads_in_fp32; megatron/model/distributed.py; megatron/optimizer:
Float16OptimizerWithFloat16Params, clip_grads). Bytes moved of each parameter: a microbatch's
gradient is added to one of 32 bits, zeroed before the first (2 + 4 + 4; the products of the weights
do not do so by themselves); in a step gradients are zeroed (4), averaged over replicas (4 + 4),
their norm is taken (4), they are clipped (4 + 4), Adam (16 + 12), the copy to 16 bits (4 + 2): 58,
which is 29 times 2."""

OPTIMIZERS: Mapping[str, Optimizer] = {each.name: each for each in (ADAMW, MIXED_ADAM)}
