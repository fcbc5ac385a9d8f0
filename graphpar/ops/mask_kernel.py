"""The Triton kernel of a seeded dropout: the mask is made while the values pass through."""

import triton
import triton.language as tl

BLOCK = 256  # counters of one program, each of 8 elements
WARPS = 4
NUMBERS = list(range(2, 14))  # places of the arguments that are no tensors


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def masked(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    seed: tl.int64,
    number: tl.int64,
    call: tl.int64,
    scale_bits: tl.int64,
    limit: tl.int32,
    lanes: tl.int64,
    width: tl.int64,
    start: tl.int64,
    stride: tl.int64,
    length: tl.int64,
    offset: tl.int64,
    pitch: tl.int64,
    RUNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``x`` times a factor where the half-word of an element is below ``limit``, times 0 elsewhere.

    A lane is a counter of one run: ``width`` of them hold the ``length`` elements of each run. Run
    r begins at element ``start + stride * r`` of the whole tensor, and at ``offset + pitch * r`` of
    ``x``. ``scale_bits`` are those of the factor, a float64.

    Constants: ``RUNS``: there may be several. ``ALIGNED``: all five lengths are multiples of 8, and
    are given in units of 8. ``WIDE``: ``lanes`` may not fit into 32 bits.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = lane < lanes
    if RUNS:
        run = lane // width.to(lane.dtype)
        column = (lane - run * width.to(lane.dtype)).to(tl.int64)
        first = start + run.to(tl.int64) * stride
        place = offset + run.to(tl.int64) * pitch
    else:
        column = lane.to(tl.int64)
        first = start + tl.zeros_like(column)
        place = offset + tl.zeros_like(column)

    j = tl.arange(0, 8)[None, :]
    if ALIGNED:
        counter = first + column
        at = (place + column)[:, None] * 8 + j
        valid = there[:, None]
    else:
        counter = first // 8 + column
        i = (column * 8 - first % 8)[:, None] + j
        at = place[:, None] + i
        valid = there[:, None] & (i >= 0) & (i < length)

    # The counter and key of graphpar.ops.philox, whose words these are.
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, number.to(tl.uint32), call.to(tl.uint32))
    # Joined, so that each is made once whatever the order in which threads hold the elements.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), BLOCK, 4)
    half = tl.reshape(tl.join(words & 0xFFFF, words >> 16), BLOCK, 8)

    # A product in the type of opmath, rounded once, as torch's with a number is.
    x = tl.load(x_ptr + at, mask=valid, other=0.0)
    computed = tl.float64 if x.dtype == tl.float64 else tl.float32
    scale = scale_bits.to(tl.float64, bitcast=True).to(computed)
    factor = tl.where(half < limit.to(tl.uint32), scale, 0.0)
    tl.store(out_ptr + at, (x.to(computed) * factor).to(x.dtype), mask=valid)
