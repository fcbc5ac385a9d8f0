"""Text that the generated Triton kernels share."""

from __future__ import annotations

from collections.abc import Iterator

from graphpar.codegen.sparse_rnn.spec import KernelSpec, power_of_two

GIVE_UP = 1 << 26
"""Reads after which a thread that waits gives up and raises the error flag."""

HELPERS = '''
@triton.jit
def pair(a, b):
    """Two floats as one element of 64 bits, so that one gather serves two batch columns."""
    low = a.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (b.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def one(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def other(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def tanh(x):
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def half(x):
    """The upper 16 bits of a float rounded to bf16, to nearest even, in integers: the same on
    every backend. The NaN that a GPU makes has all bits set, and would be rounded to 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000)
    return ((size + 0x7FFF + ((size >> 16) & 1)) >> 16) | ((bits >> 16) & 0x8000)


@triton.jit
def widened(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def tagged(payload, epoch):
    """A word of the exchange: 32 bits of payload, and above them the epoch."""
    return (payload.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
'''

SPIN = '''
@triton.jit
def spin(word, address, epoch, error_ptr):
    """Read each word again until it carries the epoch; each thread waits for its own alone."""
    return tl.inline_asm_elementwise(
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
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait(words, there, epoch, error_ptr, SPIN: tl.constexpr):
    """The payloads of the words, once all of them carry the epoch."""
    fine = epoch.to(tl.int64) << 32
    word = tl.load(words, mask=there, other=fine, volatile=True)
    if SPIN:
        payload = spin(word, words.to(tl.int64), epoch, error_ptr.to(tl.int64))
    else:
        late = tl.max(tl.where((word >> 32).to(tl.int32) != epoch, 1, 0), 0)
        while late > 0:
            word = tl.load(words, mask=there, other=fine, volatile=True)
            late = tl.max(tl.where((word >> 32).to(tl.int32) != epoch, 1, 0), 0)
        payload = word.to(tl.int32)
    return payload
'''.replace("GIVE_UP", str(GIVE_UP))

COUNTER = '''
@triton.jit
def arrive(counter_ptr):
    """Tell that this block has written its words of the step."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def meet(counter_ptr, count, error_ptr):
    """Wait until ``count`` arrivals."""
    tries = 0
    late = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") - count
    while late < 0:
        late = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") - count
        tries += 1
        if tries > GIVE_UP:
            tl.atomic_xchg(error_ptr, 1, sem="relaxed", scope="gpu")
            late = late * 0
    tl.debug_barrier()


@triton.jit
def fetch(words, there):
    """The payloads of words that are complete."""
    return tl.load(words, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
'''.replace("GIVE_UP", str(GIVE_UP))


def sizes(spec: KernelSpec) -> dict[str, int]:
    """The sizes that the text names."""
    return {
        "H": spec.hidden,
        "B": spec.batch,
        "N": spec.exchanged,
        "NP": power_of_two(spec.exchanged),
        "W": spec.word_columns,
        "G": spec.cell.gates,
        "KT": spec.depth,
        "S": spec.threads,
        "R": spec.rows,
        "Q": spec.slots,
        "P": spec.programs,
    }


def weights_text(spec: KernelSpec) -> Iterator[str]:
    """Load what stays on chip: non-zeros, their columns, and where each row's slots are; and what
    the launch counts on from."""
    yield "block = tl.program_id(0)"
    yield "k = tl.arange(0, KT * S)"
    yield "value = tl.load(value_ptr + block * (KT * S) + k)"
    yield "column = tl.load(column_ptr + block * (KT * S) + k)"
    yield "rq = tl.arange(0, R * Q)"
    for gate in range(spec.gates):
        place = f"(block * {spec.gates} + {gate}) * (R * Q) + rq"
        yield f"slots_{gate} = tl.load(slot_ptr + {place})"
    yield "unit = tl.load(unit_ptr + block * R + tl.arange(0, R))"
    yield "own = unit >= 0"
    yield "j = tl.arange(0, NP)"
    yield "there = j < N"
    yield "epoch = tl.load(clock_ptr)"
    if spec.sync == "counter":
        yield "arrived = tl.load(clock_ptr + 1)"


def product_text(spec: KernelSpec, source: str, epoch: str) -> Iterator[str]:
    """``y_GATE_COLUMN``, the recurrent product of the own units, for every batch column."""
    if spec.sync == "counter":
        yield f"meet(counter_ptr, arrived + ({epoch} - epoch) * P, error_ptr)"
    for word in range(spec.word_columns):
        words = f"{source} + {word} * N + j"
        if spec.sync == "counter":
            yield f"x = fetch({words}, there)"
        else:
            yield f"x = wait({words}, there, {epoch}, error_ptr, SPIN)"
        if spec.state == "bf16":
            a = 2 * word
            yield "upper = (x & -65536).to(tl.float32, bitcast=True)"
            yield "picked = tl.gather(pair(widened(x), upper), column, 0)"
            yield from _sums(spec, a, a + 1 if a + 1 < spec.batch else None)
        elif word % 2 == 1 or word + 1 == spec.batch:
            last = "x.to(tl.float32, bitcast=True)"
            if word % 2:
                yield f"picked = tl.gather(pair(x_{word - 1}, {last}), column, 0)"
                yield from _sums(spec, word - 1, word)
            else:
                yield f"picked = tl.gather(pair({last}, {last}), column, 0)"
                yield from _sums(spec, word, None)
        else:
            yield f"x_{word} = x.to(tl.float32, bitcast=True)"


def _sums(spec: KernelSpec, a: int, b: int | None) -> Iterator[str]:
    yield "total = pair("
    yield "    tl.sum(tl.reshape(one(picked) * value, [KT, S]), 0),"
    yield "    tl.sum(tl.reshape(other(picked) * value, [KT, S]), 0),"
    yield ")"
    for gate in range(spec.gates):
        yield f"parts = tl.reshape(tl.gather(total, slots_{gate}, 0), [R, Q])"
        yield f"y_{gate}_{a} = tl.sum(one(parts), 1)"
        if b is not None:
            yield f"y_{gate}_{b} = tl.sum(other(parts), 1)"


def send_text(spec: KernelSpec, target: str, names: list[list[str]], epoch: str) -> Iterator[str]:
    """Write ``names[GATE][COLUMN]`` of the own units to the exchange."""
    for gate, columns in enumerate(names):
        for word in range(spec.word_columns):
            if spec.state == "fp32":
                payload = f"{columns[word]}.to(tl.int32, bitcast=True)"
            else:
                payload = f"half({columns[2 * word]})"
                if 2 * word + 1 < spec.batch:
                    payload += f" | (half({columns[2 * word + 1]}) << 16)"
            place = f"{target} + {word} * N + {gate} * H + unit"
            yield f"word = tagged({payload}, {epoch})"
            yield f'tl.store({place}, word, mask=own, cache_modifier=".cg")'
    if spec.sync == "counter":
        yield "arrive(counter_ptr)"
