"""The bytes of a program's parameters and buffers on one rank."""

from __future__ import annotations

from graphpar.program import State
from graphpar.types import local_shape

OPTIMIZER_STATES = 2
"""AdamW's moments, in the parameter's dtype."""


def is_trained(state: State) -> bool:
    """Whether it has a gradient and optimizer state."""
    return state.kind == "parameter" and state.spec.differentiable


def local_nbytes(state: State, ranks: int) -> int:
    """The bytes of rank 0's part."""
    numel = 1
    for size in local_shape(state.spec.shape, state.type, 0, ranks):
        numel *= size
    return numel * state.spec.dtype.itemsize


def training_nbytes(state: State, ranks: int) -> int:
    """The same with its gradient and AdamW's moments, if it is trained."""
    return local_nbytes(state, ranks) * (2 + OPTIMIZER_STATES if is_trained(state) else 1)
