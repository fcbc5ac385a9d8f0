"""Launch the kernel of a seeded dropout on the GPU that holds the values."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from graphpar.types import Shard, intervals

TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
_PER_CALL = 8  # elements per counter
_LEAST_CAPABILITY = 8, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A part of a tensor that is regular in it: ``runs`` times ``length`` elements in a row.

    Run r begins at element ``start + stride * r`` of the whole tensor and at ``offset + pitch * r``
    of the part.
    """

    runs: int
    length: int
    start: int
    stride: int
    offset: int
    pitch: int

    @property
    def aligned(self) -> bool:
        """Whether every run begins and ends with a counter, and 8 elements lie in one place."""
        numbers = self.length, self.start, self.stride, self.offset, self.pitch
        return all(number % _PER_CALL == 0 for number in numbers)

    @property
    def width(self) -> int:
        """The most counters that a run takes part in."""
        period = _PER_CALL // math.gcd(self.stride, _PER_CALL)
        heads = ((self.start + r * self.stride) % _PER_CALL for r in range(min(period, self.runs)))
        return -(-(max(heads) + self.length) // _PER_CALL)


def runs_of(
    shape: Sequence[int], dim: int, blocks: Sequence[int], rank: int, ranks: int, units: int
) -> Iterator[Runs]:
    """Those of one rank's part, of ``shape``; as in :func:`graphpar.ops.philox.keep_mask`."""
    if not blocks:
        yield Runs(runs=1, length=math.prod(shape), start=0, stride=0, offset=0, pitch=0)
        return
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    stride, pitch, offset = sum(blocks) * inner, shape[dim] * inner, 0
    for first, size in intervals(Shard(dim, tuple(blocks), units), rank, ranks):
        length, start = size * inner, first * inner
        if not outer * length:
            continue
        if length == stride:
            yield Runs(runs=1, length=outer * length, start=0, stride=0, offset=0, pitch=0)
        elif outer == 1:
            yield Runs(runs=1, length=length, start=start, stride=0, offset=offset, pitch=0)
        else:
            yield Runs(
                runs=outer, length=length, start=start, stride=stride, offset=offset, pitch=pitch
            )
        offset += length


def arguments(
    part: Runs, seed: int, stream: tuple[int, int], p: float
) -> tuple[int, list[int], dict[str, int]]:
    """The blocks of a launch, and the numbers and constants that its kernel takes."""
    from graphpar.ops.mask_kernel import BLOCK, WARPS

    unit = _PER_CALL if part.aligned else 1
    lengths = part.start, part.stride, part.length, part.offset, part.pitch
    lanes = part.runs * part.width
    (scale_bits,) = struct.unpack("q", struct.pack("d", 1 / (1 - p)))
    limit = round((1 - p) * 2**16)
    signed = (seed + 2**63) % 2**64 - 2**63
    numbers = [signed, *stream, scale_bits, limit, lanes, part.width, *(n // unit for n in lengths)]
    constants = {
        "RUNS": part.runs > 1,
        "ALIGNED": part.aligned,
        "WIDE": lanes + BLOCK >= 2**31,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    return -(-lanes // BLOCK), numbers, constants


def launch(
    x: Tensor, out: Tensor, part: Runs, seed: int, stream: tuple[int, int], p: float
) -> None:
    """Write ``part`` of ``out`` from that of ``x``; both are contiguous."""
    from graphpar.ops import mask_kernel

    blocks, numbers, constants = arguments(part, seed, stream, p)
    with torch.cuda.device_of(x):
        mask_kernel.masked[(blocks,)](x, out, *numbers, **constants)


def masked_part(
    x: Tensor,
    seed: int,
    stream: tuple[int, int],
    p: float,
    dim: int = 0,
    blocks: Sequence[int] = (),
    rank: int = 0,
    ranks: int = 1,
    units: int = 0,
) -> Tensor:
    """``x`` times its :func:`graphpar.ops.philox.keep_mask` and ``1 / (1 - p)``, in one pass.

    Bit by bit what torch's products give. What is not contiguous is copied before and after.
    """
    given = x.contiguous()
    out = torch.empty_like(given)
    for part in runs_of(x.shape, dim, blocks, rank, ranks, units):
        launch(given, out, part, seed, stream, p)
    return out if x.is_contiguous() else torch.empty_like(x).copy_(out)


def runs_here(x: Tensor) -> bool:
    """Whether the kernel can take ``x``."""
    return x.is_cuda and x.dtype in TYPES and _compiles(x.device)


@cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton is there, knows the GPU, and has what it needs to compile."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    try:
        masked_part(torch.empty(8, device=device), 0, (0, 0), 0.5)
    except Exception as error:  # of the compiler or the driver, which have many
        warnings.warn(
            f"the masks of dropout are made by torch's ops, since triton refuses: {error}",
            stacklevel=2,
        )
        return False
    return True
