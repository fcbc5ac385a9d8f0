"""How the text of a fast kernel reads and writes shared memory.

By Gluon's own arrays; or, where Gluon does not gather from them (triton 3.6), by PTX in one buffer,
with the barriers that the compiler does not know to be needed. That the buffer lies at the start of
shared memory is checked by each launch: else it raises the error flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.limits import LINE
from graphpar.codegen.sparse_rnn.spec import power_of_two

MISPLACED = 2
"""The error flag of a launch whose buffer lies elsewhere."""
_LINE_BYTES = 8 * LINE
_ACCESS = '''
@gluon.jit
def getBITS(room, index, AT: gl.constexpr, LENGTH: gl.constexpr, SPIN: gl.constexpr):
    """Elements of the array that starts in line AT of shared memory."""
    if SPIN:
        found = gl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, global_smem; mad.lo.u32 a, $1, BYTES, a;"
            " ld.shared.bBITS $0, [a + " + f"{AT * LINE_BYTES}" + "]; }",
            "=CONSTRAINT,r",
            [index],
            dtype=gl.intBITS,
            is_pure=False,
            pack=1,
        )
    else:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        found = room.index(AT)._reinterpret(gl.intBITS, [LENGTH], LINE).gather(index, 0)
    return found


@gluon.jit
def putBITS(
    room, value, AT: gl.constexpr, START: gl.constexpr, SIZE: gl.constexpr, SPIN: gl.constexpr
):
    """Write the elements [START, START + SIZE) of the array that starts in line AT."""
    if SPIN:
        gl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, global_smem; mad.lo.u32 a, $1, BYTES, a; mov.b32 $0, 0;"
            " st.shared.bBITS [a + " + f"{AT * LINE_BYTES + START * BYTES}" + "], $2; }",
            "=&r,r,CONSTRAINT",
            [kept(gl.arange(0, SIZE, layout=value.type.layout)), value],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        whole = room.index(AT)._reinterpret(gl.intBITS, [START + SIZE], LINE)
        whole.slice(START, SIZE).store(value)
'''


@dataclass(frozen=True, slots=True)
class Array:
    """An array in shared memory: ``name`` in Gluon, or ``line`` of the buffer for PTX.

    ``bits`` of an element; ``length``: elements.
    """

    name: str
    bits: int
    length: int
    line: int
    inline: bool

    @property
    def lines(self) -> int:
        return self.length * self.bits // (64 * LINE)

    def made(self) -> str:
        """Allocate it, in Gluon's own way."""
        size = power_of_two(self.length)
        return f"{self.name} = gl.allocate_shared_memory(gl.int{self.bits}, [{size}], LINE)"

    def gather(self, index: str) -> str:
        if self.inline:
            return f"get{self.bits}(room, {index}, {self.line}, {self.length}, SPIN)"
        return f"{self.name}.gather({index}, 0)"

    def store(self, value: str, start: str, size: str) -> str:
        """Write ``size`` elements from ``start`` on, or all if that is empty."""
        if self.inline:
            return f"put{self.bits}(room, {value}, {self.line}, {start or 0}, {size}, SPIN)"
        part = f".slice({start}, {size})" if start else ""
        return f"{self.name}{part}.store({value})"


def states_of(spec: FastSpec, turn: int) -> Array:
    """The states of a pass."""
    line = turn * spec.states_lines
    return Array(f"states_{turn}", 8 * spec.element_bytes, spec.states, line, spec.inline)


def sums_of(spec: FastSpec, a: int) -> Array:
    """The sums of all slots for the batch columns ``a`` and the next."""
    length = spec.segments * spec.threads
    line = spec.passes * spec.states_lines + spec.words_lines + a // 2 * (length // LINE)
    return Array(f"sums_{a}", 64, length, line, spec.inline)


def room_text(spec: FastSpec) -> Iterator[str]:
    """Allocate the buffer that holds all arrays, and find whether it is where PTX looks for it."""
    lines = sums_of(spec, 0).line + -(-spec.batch // 2) * sums_of(spec, 0).lines
    yield f"room = gl.allocate_shared_memory(gl.int64, [{lines}, {LINE}], LINE)"
    yield "lane = gl.arange(0, 32, layout=SLOT)"
    yield "mark = (lane.to(gl.int64) + 1) * 0x1E3779B97F4A7C15"
    first = sums_of(spec, 0)  # nobody writes it before the first barrier in the loop
    yield f"room.index({first.line}).store(mark)"
    yield "tl.debug_barrier()"
    yield f"lost = {first.gather('lane')} != mark"
    yield f"gl.store(error_ptr + lane * 0, {MISPLACED}, mask=lost)"


def arrays_text(spec: FastSpec) -> Iterator[str]:
    """Allocate the arrays, in Gluon's own way."""
    if spec.shared_words:
        yield "gl.barrier()  # or there is one in the loop: words and states are one buffer"
    if spec.passes == 1:
        kind, length = f"gl.int{8 * spec.element_bytes}", power_of_two(spec.states)
        yield f"states_0 = room.index(0)._reinterpret({kind}, [{length}], LINE)"
    else:  # parts of one buffer would be taken to overlap: a barrier more for each pass
        for turn in range(spec.passes):
            yield states_of(spec, turn).made()
    for a in range(0, spec.batch, 2):
        yield sums_of(spec, a).made()


def hold(spec: FastSpec, word: str, *, values: bool = False) -> Iterator[str]:
    """Keep the ``k``-th word of each thread, or its value, in shared memory."""
    line = _held_line(spec, "k", values)
    if spec.inline:
        word = f"bits({word})" if values else word
        yield f"    put32(room, {word}, {line}, 0, THREADS, SPIN)"
        return
    yield f"    held = {_held(line, values)}"
    yield f"    held.store({word})"


def held(spec: FastSpec, *, values: bool = False) -> str:
    """The ``k``-th non-zero's word, or value, of shared memory."""
    line = _held_line(spec, "k - KR", values)
    if not spec.inline:
        return f"{_held(line, values)}.load(SLOT)"
    found = f"get32(room, thread, {line}, THREADS, SPIN)"
    return f"real({found})" if values else found


def _held_line(spec: FastSpec, k: str, values: bool) -> str:
    """Words lie behind the states, values behind the words. Layouts are of powers of two, so the
    states' own are longer than they: nothing lies or is read there."""
    start = spec.passes * spec.states_lines if spec.inline or spec.passes == 1 else 0
    if values:
        start += spec.shared_words * spec.threads // (2 * LINE)
    return f"{start} + ({k}) * {spec.threads // (2 * LINE)}"


def _held(line: str, values: bool) -> str:
    kind = "gl.float32" if values else "gl.int32"
    return f"room.index({line})._reinterpret({kind}, [THREADS], LINE)"


def end_text(spec: FastSpec) -> Iterator[str]:
    """Use the buffer last: the compiler gives its memory to others from there on."""
    if spec.inline:
        yield "tl.debug_barrier()"
        yield f"room.index({sums_of(spec, 0).line}).store(lane.to(gl.int64))"


def access_text() -> str:
    """The functions that read and write by PTX."""
    found = ""
    for bits, constraint in (("32", "r"), ("64", "l")):
        text = _ACCESS.replace("LINE_BYTES", str(_LINE_BYTES)).replace("CONSTRAINT", constraint)
        found += text.replace("BYTES", str(int(bits) // 8)).replace("BITS", bits)
    return found
