"""Text that the fast kernels share, in Gluon: a thread is a slot.

A gather of 64 bits brings four batch columns of a state in bf16. The upper of the two halves of 32
bits is read as a float with the lower still below it; the sender picks the upper half so that the
whole is nearest, which is as exact as rounding it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from graphpar.codegen.sparse_rnn.devices import WARP
from graphpar.codegen.sparse_rnn.emit_common import GIVE_UP
from graphpar.codegen.sparse_rnn.fast_spec import WHOLE_WORD_COLUMNS, FastSpec
from graphpar.codegen.sparse_rnn.plan import BATCH_PER_WORD

IMPORTS = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
"""

HELPERS = '''
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
def halves(a, b):
    """Two bf16 in 32 bits: a to nearest even below; above, what makes the whole nearest to b."""
    lower = ((bits(a) + 0x7FFF + ((bits(a) >> 16) & 1)) >> 16) & 0xFFFF
    upper = ((bits(b) & 0x7FFFFFFF) - lower + 0x8000) >> 16
    upper = gl.maximum(upper, 0) | ((bits(b) >> 16) & 0x8000)
    return (upper << 16) | lower


@gluon.jit
def tagged(payload, epoch):
    """A word of the exchange: 32 bits of payload, and above them the epoch."""
    return (payload.to(gl.int64) & 0xFFFFFFFF) | (epoch.to(gl.int64) << 32)


@gluon.jit
def kept(word):
    """The word itself, behind the compiler's back: else it would keep two more registers for each
    word over all steps, one with the column and one with the value."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )


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
    states,
    epoch,
    error_ptr,
    N: gl.constexpr,
    START: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    SPIN: gl.constexpr,
):
    """Wait for the elements [START, START + SIZE), and put them into shared memory."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    unit = START + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WORDS))
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, WORDS))
    place = unit[:, None] * 2 + which[None, :]
    there = (unit < N)[:, None] & (which >= 0)[None, :]
    fine = epoch.to(gl.int64) << 32
    both = gl.load(source + place, mask=there, other=fine, volatile=True)
    if SPIN:
        a, b = gl.split(both)
        address = source + (START + gl.arange(0, SIZE, layout=a.type.layout)) * 2
        payload = spin(a, b, address.to(gl.int64), epoch, error_ptr.to(gl.int64))
    else:
        late = gl.max(gl.max(gl.where((both >> 32).to(gl.int32) != epoch, 1, 0), 1), 0)
        while late > 0:
            both = gl.load(source + place, mask=there, other=fine, volatile=True)
            late = gl.max(gl.max(gl.where((both >> 32).to(gl.int32) != epoch, 1, 0), 1), 0)
        a, b = gl.split(both)
        payload = (a & 0xFFFFFFFF) | (b << 32)
    states.slice(START, SIZE).store(payload)
'''.replace("GIVE_UP", str(GIVE_UP))


def constants(spec: FastSpec) -> dict[str, int]:
    """The sizes that the text names."""
    return {
        "H": spec.hidden,
        "B": spec.batch,
        "N": spec.exchanged,
        "G": spec.cell.gates,
        "KR": spec.register_words,
        "KT": spec.depth,
        "R": spec.rows,
        "Q": spec.slots,
        "WARPS": spec.warps,
    }


def kernel_text(spec: FastSpec, arguments: Sequence[str], body: Iterable[str]) -> str:
    """A file with one kernel."""
    lines = [
        f'"""The fast {spec.part} of a sparse {spec.cell_name} layer, generated by graphpar.',
        "",
        spec.facts,
        "The method is that of Zhu et al. 2018 (arXiv 1804.10223): non-zeros stay on chip for all",
        "steps; blocks exchange what they computed through words that carry their epoch.",
        '"""',
        "",
        IMPORTS,
        HELPERS,
        "",
        "@gluon.jit",
        f"def {spec.part}(",
        *(f"    {name}," for name in arguments),
        *(f"    {name}: gl.constexpr," for name in (*constants(spec), "SPIN")),
        "):",
        *(f"    {line}" for line in body),
    ]
    return "\n".join(lines) + "\n"


def columns_of(spec: FastSpec, turn: int) -> range:
    """The batch columns of a pass."""
    first = turn * BATCH_PER_WORD
    return range(first, min(first + BATCH_PER_WORD, spec.batch))


def start_text(spec: FastSpec) -> Iterator[str]:
    """Load what stays on chip, make room in shared memory."""
    across = f"[{WARP // spec.slots}, {spec.slots}]"
    yield "THREADS: gl.constexpr = WARPS * 32"
    yield "SLOT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])"
    yield f"SLOTS: gl.constexpr = gl.BlockedLayout([1, 1], {across}, [WARPS, 1], [1, 0])"
    yield "UNIT: gl.constexpr = gl.SliceLayout(1, SLOTS)"
    yield "LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])"
    yield "block = gl.program_id(0)"
    yield "thread = gl.arange(0, THREADS, layout=SLOT)"
    yield "mine = word_ptr + block * (KT * THREADS) + thread"
    yield "words = ()"
    yield "for k in gl.static_range(KR):"
    yield "    words = words + (gl.load(mine + k * THREADS),)"
    if spec.shared_words:
        yield "held = gl.allocate_shared_memory(gl.int32, [KT - KR, THREADS], LINE)"
        yield "for k in gl.static_range(KT - KR):"
        yield "    held.index(k).store(gl.load(mine + (KR + k) * THREADS))"
    for turn in range(spec.passes):
        yield f"states_{turn} = gl.allocate_shared_memory(gl.int64, [{spec.states}], LINE)"
    for a in range(0, spec.batch, 2):
        yield f"sums_{a} = gl.allocate_shared_memory(gl.int64, [THREADS], LINE)"
    yield "row = gl.arange(0, R, layout=UNIT)"
    yield "part = gl.arange(0, Q, layout=gl.SliceLayout(0, SLOTS))"
    yield "at = row[:, None] * Q + part[None, :]"
    for gate in range(spec.gates):
        yield f"slots = gl.load(slot_ptr + (block * {spec.gates} + {gate}) * (R * Q) + at)"
        yield f"slots_{gate} = gl.reshape(slots, [R * Q])"
    yield "unit = gl.load(unit_ptr + block * R + row)"
    yield "own = unit >= 0"


def buffers_text(spec: FastSpec) -> Iterator[str]:
    size = f"({2 * spec.passes} * N)"
    yield "now = epoch + step"
    yield f"source = exchange_ptr + (step & 1) * {size}"
    yield f"target = exchange_ptr + ((step + 1) & 1) * {size}"


def product_text(spec: FastSpec) -> Iterator[str]:
    """Receive what all blocks sent, and ``y_GATE_COLUMN``: the product of the own rows with it."""
    for turn in range(spec.passes):
        for start, size in spec.chunks:
            given = f"source + {turn} * (2 * N), states_{turn}, now, error_ptr"
            yield f"receive({given}, N, {start}, {size}, WARPS, SPIN)"
    yield from _gather(spec)
    for a in range(0, spec.batch, 2):
        b = min(a + 1, spec.batch - 1)
        yield f"sums_{a}.store(pair(a_{a}, a_{b}))"
    for a in range(0, spec.batch, 2):
        for gate in range(spec.gates):
            yield f"both = gl.reshape(sums_{a}.gather(slots_{gate}, 0), [R, Q])"
            lower = "gl.sum(real(both.to(gl.int32)), 1)"
            yield f"y_{gate}_{a} = gl.convert_layout({lower}, UNIT)"
            if a + 1 < spec.batch:
                upper = "gl.sum(real((both >> 32).to(gl.int32)), 1)"
                yield f"y_{gate}_{a + 1} = gl.convert_layout({upper}, UNIT)"


def send_text(spec: FastSpec, names: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write ``names[GATE][COLUMN]`` of the own units to the exchange."""
    for gate, values in enumerate(names):
        for turn in range(spec.passes):
            four = [values[b] for b in columns_of(spec, turn)]
            four += [four[-1]] * (BATCH_PER_WORD - len(four))
            yield f"place = target + {turn} * (2 * N) + ({gate} * H + unit) * 2"
            for which in range(2):
                both = ", ".join(four[2 * which : 2 * which + 2])
                yield f"word = tagged(halves({both}), now + 1)"
                yield f'gl.store(place + {which}, word, mask=own, cache_modifier=".cg")'


def _gather(spec: FastSpec) -> Iterator[str]:
    for b in range(spec.batch):
        yield f"a_{b} = gl.zeros([THREADS], gl.float32, SLOT)"
    yield "for k in gl.static_range(KT):"
    if spec.shared_words:
        yield "    if k < KR:"
        yield "        word = words[k]"
        yield "    else:"
        yield "        word = held.index(k - KR).load(SLOT)"
    else:
        yield "    word = words[k]"
    yield "    if SPIN:"
    yield "        word = kept(word)"
    whole = spec.exchanged <= WHOLE_WORD_COLUMNS
    yield f"    value = {'real(word)' if whole else 'real(word & -65536)'}"
    for turn in range(spec.passes):
        yield f"    four = states_{turn}.gather(word & 0xFFFF, 0)"
        columns = columns_of(spec, turn)
        for half in range(-(-len(columns) // 2)):
            a = columns[2 * half]
            yield f"    two = {'four' if not half else '(four >> 32)'}.to(gl.int32)"
            yield f"    a_{a} += value * real(two << 16)"
            if a + 1 in columns:
                yield f"    a_{a + 1} += value * real(two)"
