"""The text of the fast forward kernel, in Gluon: a thread is a slot.

A gather of 64 bits brings four batch columns of a state in bf16. The upper of the two halves of 32
bits is read as a float with the lower still below it; the sender picks the upper half so that the
whole is nearest, which is as exact as rounding it alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphpar.codegen.sparse_rnn.emit_common import GIVE_UP
from graphpar.codegen.sparse_rnn.emit_forward import CELLS, SAVED
from graphpar.codegen.sparse_rnn.fast_spec import WHOLE_WORD_COLUMNS, FastSpec
from graphpar.codegen.sparse_rnn.plan import BATCH_PER_WORD

ARGUMENTS = (
    "word_ptr", "slot_ptr", "unit_ptr", "gates_ptr", "bias_ptr", "h_ptr", "c_ptr",
    "exchange_ptr", "error_ptr", "out_ptr", "c_out_ptr", "saved_ptr", "steps", "epoch",
)  # fmt: skip

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
    H: gl.constexpr,
    START: gl.constexpr,
    SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    SPIN: gl.constexpr,
):
    """Wait for the units [START, START + SIZE), and put their states into shared memory."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    unit = START + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WORDS))
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, WORDS))
    place = unit[:, None] * 2 + which[None, :]
    there = (unit < H)[:, None] & (which >= 0)[None, :]
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
        "G": spec.cell.gates,
        "KR": spec.register_words,
        "KT": spec.depth,
        "R": spec.rows,
        "Q": spec.slots,
        "WARPS": spec.warps,
    }


def emit_fast(spec: FastSpec) -> str:
    """The source of the fast kernel."""
    return "\n".join(_lines(spec)) + "\n"


def _lines(spec: FastSpec) -> Iterator[str]:
    facts = ", ".join(f"{name}={getattr(spec, name)}" for name in FastSpec.__slots__)
    yield f'"""The fast forward of a sparse {spec.cell_name} layer, generated by graphpar.'
    yield ""
    yield facts
    yield "The method is that of Zhu et al. 2018 (arXiv 1804.10223): non-zeros stay on chip for all"
    yield "steps; blocks exchange what they computed through words that carry their epoch."
    yield '"""'
    yield ""
    yield IMPORTS
    yield HELPERS
    yield ""
    yield "@gluon.jit"
    yield "def forward("
    for name in ARGUMENTS:
        yield f"    {name},"
    for name in (*constants(spec), "SPIN"):
        yield f"    {name}: gl.constexpr,"
    yield "):"
    for line in (*_start(spec), "for step in range(steps):", *_indented(_step(spec)), *_end(spec)):
        yield f"    {line}"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    yield from (f"    {line}" for line in lines)


def _columns(spec: FastSpec, turn: int) -> range:
    """The batch columns of a pass."""
    first = turn * BATCH_PER_WORD
    return range(first, min(first + BATCH_PER_WORD, spec.batch))


def _start(spec: FastSpec) -> Iterator[str]:
    across = f"[{32 // spec.slots}, {spec.slots}]"
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
    for gate in range(spec.cell.gates):
        yield f"slots = gl.load(slot_ptr + (block * G + {gate}) * (R * Q) + at)"
        yield f"slots_{gate} = gl.reshape(slots, [R * Q])"
    yield "unit = gl.load(unit_ptr + block * R + row)"
    yield "own = unit >= 0"
    if spec.cell_name == "gru":
        yield "bias = gl.load(bias_ptr + unit, mask=own, other=0.0)"
    for b in range(spec.batch):
        yield f"h_{b} = gl.load(h_ptr + {b} * H + unit, mask=own, other=0.0)"
        if spec.cell_name == "lstm":
            yield f"c_{b} = gl.load(c_ptr + {b} * H + unit, mask=own, other=0.0)"


def _step(spec: FastSpec) -> Iterator[str]:
    yield "t = steps - 1 - step" if spec.reverse else "t = step"
    yield "now = epoch + step"
    yield f"source = exchange_ptr + (step & 1) * ({2 * spec.passes} * H)"
    yield f"target = exchange_ptr + ((step + 1) & 1) * ({2 * spec.passes} * H)"
    for b in range(spec.batch):
        for gate in range(spec.cell.gates):
            at = f"(t * B + {b}) * (G * H) + {gate} * H + unit"
            yield f"x_{gate}_{b} = gl.load(gates_ptr + {at}, mask=own, other=0.0)"
    for turn in range(spec.passes):
        for start, size in spec.chunks:
            given = f"source + {turn} * (2 * H), states_{turn}, now, error_ptr"
            yield f"receive({given}, H, {start}, {size}, WARPS, SPIN)"
    yield from _gather(spec)
    for a in range(0, spec.batch, 2):
        b = min(a + 1, spec.batch - 1)
        yield f"sums_{a}.store(pair(a_{a}, a_{b}))"
    for a in range(0, spec.batch, 2):
        for gate in range(spec.cell.gates):
            yield f"both = gl.reshape(sums_{a}.gather(slots_{gate}, 0), [R, Q])"
            lower = "gl.sum(real(both.to(gl.int32)), 1)"
            yield f"y_{gate}_{a} = gl.convert_layout({lower}, UNIT)"
            if a + 1 < spec.batch:
                upper = "gl.sum(real((both >> 32).to(gl.int32)), 1)"
                yield f"y_{gate}_{a + 1} = gl.convert_layout({upper}, UNIT)"
    for b in range(spec.batch):
        yield from _cell(spec, b)
    for turn in range(spec.passes):
        names = [f"h_{b}" for b in _columns(spec, turn)]
        names += [names[-1]] * (BATCH_PER_WORD - len(names))
        yield f"place = target + {turn} * (2 * H) + unit * 2"
        for which in range(2):
            both = ", ".join(names[2 * which : 2 * which + 2])
            yield f"word = tagged(halves({both}), now + 1)"
            yield f'gl.store(place + {which}, word, mask=own, cache_modifier=".cg")'
    for b in range(spec.batch):
        yield f"gl.store(out_ptr + (t * B + {b}) * H + unit, h_{b}, mask=own)"


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
    whole = spec.hidden <= WHOLE_WORD_COLUMNS
    yield f"    value = {'real(word)' if whole else 'real(word & -65536)'}"
    for turn in range(spec.passes):
        yield f"    four = states_{turn}.gather(word & 0xFFFF, 0)"
        columns = _columns(spec, turn)
        for half in range(-(-len(columns) // 2)):
            a = columns[2 * half]
            yield f"    two = {'four' if not half else '(four >> 32)'}.to(gl.int32)"
            yield f"    a_{a} += value * real(two << 16)"
            if a + 1 in columns:
                yield f"    a_{a + 1} += value * real(two)"


def _cell(spec: FastSpec, b: int) -> Iterator[str]:
    names: dict[str, str | int] = {"b": b}
    for gate in range(spec.cell.gates):
        names |= {f"x{gate}": f"x_{gate}_{b}", f"y{gate}": f"y_{gate}_{b}"}
    yield f"# batch column {b}"
    yield from CELLS[spec.cell_name].replace("tl.", "gl.").format(**names).strip().splitlines()
    for place, name in enumerate(SAVED[spec.cell_name] if spec.save else ()):
        at = f"((t * {spec.cell.saved} + {place}) * H + unit) * B + {b}"
        yield f"gl.store(saved_ptr + {at}, {name.format(b=b)}, mask=own)"


def _end(spec: FastSpec) -> Iterator[str]:
    if spec.cell_name == "lstm":
        for b in range(spec.batch):
            yield f"gl.store(c_out_ptr + {b} * H + unit, c_{b}, mask=own)"
