"""Philox 4x32-10: random words as a function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section
3.3. There is no state, so that any part of a sequence can be computed alone, on any rank and again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphpar.types import Shard, intervals

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_PER_CALL = 8  # elements per counter: 16 bits each
_CHUNK = 1 << 20  # counters at a time: what a mask needs beside itself stays small

Word = Any
"""An int, or an int64 tensor, of values below 2**32."""


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[int, int]
) -> tuple[Word, Word, Word, Word]:
    """The four random words of a counter; all tensors in it have the same shape.

    A product of two words overflows int64, whose lower and upper half are right all the same. The
    second and fourth word carry its upper half along, which :func:`_mixed` drops, to the end.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2, c1, c3 = _mixed(b, c1, k0), _mixed(a, c3, k1), b, a
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _mixed(product: Word, word: Word, key: int) -> Word:
    upper = product >> 32
    upper ^= word
    upper ^= key
    upper &= _MASK
    return upper


def _below(words: tuple[Word, Word, Word, Word], limit: int) -> Tensor:
    """[n, 8]: whether half-words are below ``limit``, from 0 to 2**16."""
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, 1) < limit


def words_of(seed: int) -> tuple[int, int]:
    """The lower and the upper half of a 64-bit integer."""
    return seed & _MASK, seed >> 32 & _MASK


def keep_mask(
    shape: Sequence[int],
    keep: float,
    seed: int,
    stream: tuple[int, int],
    device: torch.device,
    dim: int = 0,
    blocks: Sequence[int] = (),
    rank: int = 0,
    ranks: int = 1,
    units: int = 0,
) -> Tensor:
    """True with probability ``keep``, rounded to 16 bits, for one rank's part of a tensor.

    Element i of the whole tensor, in the order of its indices, is kept if half-word i mod 8 of
    the counter (i div 8, *stream) is below ``keep`` * 2**16. The counter's first two words are
    the halves of i div 8; the lower half of a word comes first.

    Args:
        shape: that of the part. ``blocks`` (and ``units``) lay out dimension ``dim`` of the whole
            tensor over ``ranks``, of which this is ``rank``; without blocks the part is the whole.
        seed: the key, 64 bits. stream: two 32-bit numbers, different for each use of the seed.
    """
    if not blocks:
        found = _kept(1, 0, 0, math.prod(shape), keep, seed, stream, device)
        return found.view(list(shape))
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    stride = sum(blocks) * inner
    pieces = []
    for start, size in intervals(Shard(dim, tuple(blocks), units), rank, ranks):
        piece = _kept(outer, start * inner, stride, size * inner, keep, seed, stream, device)
        pieces.append(piece.reshape(*shape[:dim], size, *shape[dim + 1 :]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _kept(
    runs: int,
    start: int,
    stride: int,
    length: int,
    keep: float,
    seed: int,
    stream: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """[runs, length]: elements start + stride * run + 0, 1, ... of the whole tensor."""
    period = 1 if runs == 1 else _PER_CALL // math.gcd(stride, _PER_CALL)
    offsets = [(start + i * stride) % _PER_CALL for i in range(min(period, runs))]
    width = (max(offsets) + length + _PER_CALL - 1) // _PER_CALL
    kept = torch.empty(runs * width, _PER_CALL, dtype=torch.bool, device=device)
    for low in range(0, runs * width, _CHUNK):
        high = min(low + _CHUNK, runs * width)
        place = torch.arange(low, high, device=device)
        if runs > 1:
            run = place // width
            place += (run * stride + start) // _PER_CALL - run * width
        else:
            place += start // _PER_CALL
        top = place >> 32 if start + stride * runs + length >= _PER_CALL << 32 else 0
        words = philox((place & _MASK, top, *stream), words_of(seed))
        kept[low:high] = _below(words, round(keep * 2**16))
    found = kept.view(runs, -1)
    if period == 1:
        return found.narrow(1, offsets[0], length)
    result = torch.empty(runs, length, dtype=torch.bool, device=device)
    for i, offset in enumerate(offsets):
        result[i::period] = found[i::period].narrow(1, offset, length)
    return result
