"""The mask of a seeded dropout on the CPU: numpy's Philox, a loop in C.

A round of :mod:`graphpar.ops.philox` is ten of torch's ops; numpy draws five times as fast, by
Philox 4x64-10, the same construction with words of 64 bits (Salmon et al., SC 2011, section 3.3).
So the CPU's masks are other ones than a GPU's, as with torch's own generators.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpar.ops.mask_launch import Runs, runs_of

_PER_COUNTER = 16  # elements: 4 words of 64 bits, of 16 bits each
_CHUNK = 1 << 15  # elements at a time, a multiple of those of a counter

Bools = NDArray[np.bool_]


def host_mask(
    shape: Sequence[int],
    keep: float,
    seed: int,
    stream: tuple[int, int],
    dim: int = 0,
    blocks: Sequence[int] = (),
    rank: int = 0,
    ranks: int = 1,
    units: int = 0,
) -> Tensor:
    """A mask (bool, of ``shape``) on the CPU; its arguments are those of
    :func:`graphpar.ops.philox.keep_mask`, but for the device.

    Element i of the whole tensor is kept if 16-bit part i mod 16 of the counter (i div 16, 0,
    stream[0], stream[1]) is below ``keep`` * 2**16. The key is (seed, 0); the lowest part of a word
    comes first.
    """
    found = np.empty(tuple(shape), np.bool_)
    limit = round(keep * 2**16)
    for part in runs_of(shape, dim, blocks, rank, ranks, units):
        out = np.lib.stride_tricks.as_strided(
            found.reshape(-1)[part.offset :], (part.runs, part.length), (part.pitch, 1)
        )
        _fill(out, part, limit, seed, stream)
    return torch.from_numpy(found)


def _fill(out: Bools, part: Runs, limit: int, seed: int, stream: tuple[int, int]) -> None:
    """The runs of a part, many short ones at once with what lies between them."""
    rows = max(1, _CHUNK // max(part.stride, 1))
    for low in range(0, part.runs, rows):
        first = part.start + part.stride * low
        if rows == 1 or part.runs == 1:
            _below(out[low], first, limit, seed, stream)
            continue
        some = out[low : low + rows]
        whole = np.empty((len(some), part.stride), np.bool_)
        _below(whole.reshape(-1), first, limit, seed, stream)
        some[:] = whole[:, : part.length]


def _below(out: Bools, first: int, limit: int, seed: int, stream: tuple[int, int]) -> None:
    """Whether elements ``first``, ``first + 1``, ... of the whole tensor are kept."""
    counter, head = divmod(first, _PER_COUNTER)
    start = (stream[1] << 192 | stream[0] << 128 | counter) - 1  # numpy counts before it draws
    generator = np.random.Philox(key=seed % 2**64, counter=start % 2**256)
    for low in range(-head, len(out), _CHUNK):
        high = min(low + _CHUNK, len(out))
        words = generator.random_raw(-(-(high - low) // _PER_COUNTER) * 4)
        parts = words.astype("<u8", copy=False).view("<u2")
        np.less(parts[max(-low, 0) : high - low], limit, out=out[max(low, 0) : high])
