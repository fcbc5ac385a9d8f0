"""Functions of the fast kernels' text."""

from __future__ import annotations

from collections.abc import Mapping

from graphpar.codegen.sparse_rnn.emit_common import GIVE_UP
from graphpar.codegen.sparse_rnn.emit_fast_shared import access_text
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import Value

IMPORTS = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
"""
INLINE_IMPORT = "import triton.language as tl\n"

_SHARED = '''
@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-1.4426950408889634 * x))


@gluon.jit
def tanh(x):
    e = gl.exp2(-2.8853900817779268 * gl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return gl.where(x < 0, -y, y)


@gluon.jit
def bits(x):
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def real(x):
    return x.to(gl.float32, bitcast=True)


@gluon.jit
def pair(a, b):
    """Two floats in 64 bits."""
    return (bits(a).to(gl.int64) & 0xFFFFFFFF) | (bits(b).to(gl.int64) << 32)


@gluon.jit
def kept(word):
    """The word itself, behind the compiler's back: else it would keep more registers over all
    steps, for each word with its column and its value, for each piece with its addresses."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )
'''

_BF16 = '''
@gluon.jit
def size(x):
    """The bits without the sign; of the NaN that a GPU makes fewer, or rounding would carry on
    into the sign and make it 0."""
    return gl.minimum(bits(x) & 0x7FFFFFFF, 0x7FC00000)


@gluon.jit
def halves(a, b):
    """Two bf16 in 32 bits: a to nearest even below; above, what makes the whole nearest to b."""
    lower = ((size(a) + 0x7FFF + ((size(a) >> 16) & 1)) >> 16) | ((bits(a) >> 16) & 0x8000)
    upper = (size(b) - lower + 0x8000) >> 16
    upper = gl.maximum(upper, 0) | ((bits(b) >> 16) & 0x8000)
    return (upper << 16) | lower


@gluon.jit
def lower(two):
    return real(two << 16)


@gluon.jit
def upper(word):
    return real(word & -65536)
'''

_FP16 = '''
@gluon.jit
def half_bits(x):
    return x.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF


@gluon.jit
def halves(a, b):
    """Two fp16 in 32 bits."""
    return half_bits(a) | (half_bits(b) << 16)


@gluon.jit
def lower(two):
    return two.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def upper(word):
    return lower(word >> 16)
'''

_TAGGED = '''
@gluon.jit
def tagged(payload, epoch):
    """A word of the exchange: 32 bits of payload, and above them the epoch."""
    return (payload.to(gl.int64) & 0xFFFFFFFF) | (epoch.to(gl.int64) << 32)
'''

_WIDE = '''
@gluon.jit
def spin(a, b, address, epoch, error_ptr):
    """Read two words again until both carry the epoch; each thread waits for its own alone."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred done, busy;
        .reg .b32 one, two, tag, tries, flag;
        .reg .b64 first, second;
        mov.b64 first, $1;
        mov.b64 second, $2;
        mov.u32 tries, 0;
        CHECK:
        mov.b64 {one, tag}, first;
        setp.eq.s32 done, tag, $4;
        mov.b64 {two, tag}, second;
        setp.eq.and.s32 done, tag, $4, done;
        @done bra READY;
        add.u32 tries, tries, 1;
        and.b32 flag, tries, 4095;
        setp.ne.u32 busy, flag, 0;
        @busy bra AGAIN;
        ld.relaxed.gpu.global.b32 flag, [$5];
        setp.ne.u32 done, flag, 0;
        @done bra READY;
        setp.lt.u32 busy, tries, GIVE_UP;
        @busy bra AGAIN;
        mov.u32 flag, 1;
        st.relaxed.gpu.global.b32 [$5], flag;
        bra READY;
        AGAIN:
        ld.relaxed.gpu.global.v2.b64 {first, second}, [$3];
        bra CHECK;
        READY:
        mov.b64 $0, {one, two};
        }""",
        "=l,l,l,l,r,l",
        [a, b, address, epoch, error_ptr],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def receive(
    source,
    epoch,
    error_ptr,
    N: gl.constexpr,
    START: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    SPIN: gl.constexpr,
):
    """The elements [START, START + SIZE), once all of them have come."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    unit = gl.arange(0, SIZE, layout=gl.SliceLayout(1, WORDS))
    if SPIN:
        unit = kept(unit)
    unit = START + unit
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, WORDS))
    place = unit[:, None] * 2 + which[None, :]
    there = (unit < N)[:, None] & (which >= 0)[None, :]
    fine = epoch.to(gl.int64) << 32
    both = gl.load(source + place, mask=there, other=fine, volatile=True)
    if SPIN:
        a, b = gl.split(both)
        same = kept(gl.arange(0, SIZE, layout=a.type.layout))
        address = source + (START + same) * 2
        payload = spin(a, b, address.to(gl.int64), epoch, error_ptr.to(gl.int64))
    else:
        late = gl.max(gl.max(gl.where((both >> 32).to(gl.int32) != epoch, 1, 0), 1), 0)
        while late > 0:
            both = gl.load(source + place, mask=there, other=fine, volatile=True)
            late = gl.max(gl.max(gl.where((both >> 32).to(gl.int32) != epoch, 1, 0), 1), 0)
        a, b = gl.split(both)
        payload = (a & 0xFFFFFFFF) | (b << 32)
    return payload
'''.replace("GIVE_UP", str(GIVE_UP))

_NARROW = '''
@gluon.jit
def spin(word, address, epoch, error_ptr):
    """Read a word again until it carries the epoch; each thread waits for its own alone."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred done, busy;
        .reg .b32 tag, tries, flag;
        .reg .b64 seen;
        mov.b64 seen, $1;
        mov.u32 tries, 0;
        CHECK:
        mov.b64 {$0, tag}, seen;
        setp.eq.s32 done, tag, $3;
        @done bra READY;
        add.u32 tries, tries, 1;
        and.b32 flag, tries, 4095;
        setp.ne.u32 busy, flag, 0;
        @busy bra AGAIN;
        ld.relaxed.gpu.global.b32 flag, [$4];
        setp.ne.u32 done, flag, 0;
        @done bra READY;
        setp.lt.u32 busy, tries, GIVE_UP;
        @busy bra AGAIN;
        mov.u32 flag, 1;
        st.relaxed.gpu.global.b32 [$4], flag;
        bra READY;
        AGAIN:
        ld.relaxed.gpu.global.b64 seen, [$2];
        bra CHECK;
        READY:
        }""",
        "=&r,l,l,r,l",
        [word, address, epoch, error_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def receive(
    source,
    epoch,
    error_ptr,
    N: gl.constexpr,
    START: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    SPIN: gl.constexpr,
):
    """The elements [START, START + SIZE), once all of them have come."""
    WORDS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    unit = gl.arange(0, SIZE, layout=WORDS)
    if SPIN:
        unit = kept(unit)
    unit = START + unit
    fine = epoch.to(gl.int64) << 32
    word = gl.load(source + unit, mask=unit < N, other=fine, volatile=True)
    if SPIN:
        address = (source + unit).to(gl.int64)
        payload = spin(word, address, epoch, error_ptr.to(gl.int64))
    else:
        late = gl.max(gl.where((word >> 32).to(gl.int32) != epoch, 1, 0), 0)
        while late > 0:
            word = gl.load(source + unit, mask=unit < N, other=fine, volatile=True)
            late = gl.max(gl.where((word >> 32).to(gl.int32) != epoch, 1, 0), 0)
        payload = word.to(gl.int32)
    return payload
'''.replace("GIVE_UP", str(GIVE_UP))

_COUNTER = '''
@gluon.jit
def joined(a, b):
    """A word of the exchange: two payloads."""
    return (a.to(gl.int64) & 0xFFFFFFFF) | (b.to(gl.int64) << 32)


@gluon.jit
def arrive(counter_ptr):
    """Tell that this block has written its words of the step."""
    gl.barrier()
    gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def acquire(counter, count, error_ptr):
    """Read the counter again until ``count`` arrivals; each thread acquires for itself."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred done, busy;
        .reg .b32 seen, tries, flag;
        mov.u32 tries, 0;
        CHECK:
        ld.acquire.gpu.global.b32 seen, [$1];
        sub.s32 $0, seen, $2;
        setp.ge.s32 done, $0, 0;
        @done bra READY;
        add.u32 tries, tries, 1;
        and.b32 flag, tries, 4095;
        setp.ne.u32 busy, flag, 0;
        @busy bra CHECK;
        ld.relaxed.gpu.global.b32 flag, [$3];
        setp.ne.u32 done, flag, 0;
        @done bra READY;
        setp.lt.u32 busy, tries, GIVE_UP;
        @busy bra CHECK;
        mov.u32 flag, 1;
        st.relaxed.gpu.global.b32 [$3], flag;
        READY:
        }""",
        "=&r,l,r,l",
        [counter, count, error_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def meet(
    counter_ptr,
    count,
    error_ptr,
    THREADS: gl.constexpr,
    WARPS: gl.constexpr,
    SPIN: gl.constexpr,
):
    """Wait until ``count`` arrivals of all launches."""
    if SPIN:
        EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        same = gl.arange(0, THREADS, layout=EACH).to(gl.int64) * 0
        acquire(same + counter_ptr.to(gl.int64), count, error_ptr.to(gl.int64))
    else:
        late = gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") - count
        while late < 0:
            late = gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") - count


@gluon.jit
def fetch(
    source,
    N: gl.constexpr,
    START: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The elements [START, START + SIZE), which are complete."""
    WORDS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    unit = START + gl.arange(0, SIZE, layout=WORDS)
    return gl.load(source + unit, mask=unit < N, other=0, cache_modifier=".cg")
'''.replace("GIVE_UP", str(GIVE_UP))

PAYLOADS: Mapping[Value, str] = {"bf16": "halves", "fp16": "halves", "fp32": "bits"}
"""The function that makes 32 bits of one or two columns."""
SYNC = {
    "lamport": "through words that carry their epoch",
    "counter": "behind a counter of arrivals",
}


def helpers(spec: FastSpec) -> str:
    """The functions that the text of a kernel calls."""
    values = {"bf16": _BF16, "fp16": _FP16, "fp32": ""}[spec.value]
    lamport = _TAGGED + (_WIDE if spec.payloads == 2 else _NARROW)
    found = _SHARED + values + (lamport if spec.sync == "lamport" else _COUNTER)
    if not spec.inline:
        return found
    return found.replace("gl.barrier()", "tl.debug_barrier()") + access_text()
