"""A model of bank conflicts in shared-memory gathers.

Shared memory has 32 banks of 4 bytes. A warp's load of 8 bytes a lane is served in two halves of
16 lanes, one of 4 bytes in one pass of 32 lanes; a pass takes as many wavefronts as the most
loaded bank has *distinct* words (lanes that read the same word are served together).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WARP = 32
BANK_BYTES = 4


def lanes_per_pass(load_bytes: int) -> int:
    """Lanes that one pass serves, which is also the number of bank groups they may hit."""
    return min(WARP, WARP * BANK_BYTES // load_bytes)


def wavefronts_per_load(index: NDArray[np.integer], *, load_bytes: int = 8) -> float:
    """Mean wavefronts of a warp's load; 2.0 is ideal for 8 bytes, 1.0 for 4.

    Args:
        index: [programs, steps, threads], the element that each thread gathers at each step.
        load_bytes: bytes of an element: 4, 8 or 16.
    """
    lanes = lanes_per_pass(load_bytes)
    passes = np.sort(index.reshape(-1, lanes).astype(np.int32), axis=1)
    first = np.ones(passes.shape, bool)
    first[:, 1:] = passes[:, 1:] != passes[:, :-1]
    cell = np.arange(len(passes), dtype=np.int64)[:, None] * lanes + passes % lanes
    counts = np.bincount(cell[first], minlength=len(passes) * lanes)
    most = counts.reshape(-1, lanes).max(axis=1)
    return float(most.mean()) * (WARP // lanes)
