"""The texts of the fast kernels: forward, and backward on the transposed pattern."""

from __future__ import annotations

from collections.abc import Iterator

from graphpar.codegen.sparse_rnn import emit_backward, emit_forward
from graphpar.codegen.sparse_rnn.emit_fast import (
    buffer_of,
    buffers_text,
    clock_text,
    kernel_text,
    product_text,
    send_text,
    start_text,
)
from graphpar.codegen.sparse_rnn.emit_fast_shared import end_text
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec

FORWARD = (
    "word_ptr", "slot_ptr", "unit_ptr", "gates_ptr", "bias_ptr", "h_ptr", "c_ptr",
    "exchange_ptr", "clock_ptr", "error_ptr", "out_ptr", "c_out_ptr", "saved_ptr", "steps",
)  # fmt: skip
BACKWARD = (
    "word_ptr", "slot_ptr", "unit_ptr", "dout_ptr", "dc_ptr", "out_ptr", "saved_ptr", "h_ptr",
    "c_ptr", "exchange_ptr", "clock_ptr", "error_ptr", "dgates_ptr", "drecurrent_ptr", "dh_ptr",
    "dc_out_ptr", "steps",
)  # fmt: skip


def arguments(spec: FastSpec) -> tuple[str, ...]:
    """The names of the kernel's arguments, in order; ``SPIN`` and the sizes are constants."""
    names = FORWARD if spec.part == "forward" else BACKWARD
    values = ("value_ptr",) if spec.value == "fp32" else ()
    counter = ("counter_ptr",) if spec.sync == "counter" else ()
    return (*values, *counter, *names)


def emit_fast(spec: FastSpec) -> str:
    """The source of the fast kernel. Operands are those of the reference kernel, in float32."""
    body = _forward(spec) if spec.part == "forward" else _backward(spec)
    return kernel_text(spec, arguments(spec), body)


def _load(name: str, pointer: str, at: str, mask: str = "own") -> str:
    return f"{name} = gl.load({pointer} + {at}, mask={mask}, other=0.0)"


def _around(product: Iterator[str], inputs: list[str], spec: FastSpec) -> Iterator[str]:
    """Inputs are read before the wait, which hides them, unless registers are scarce."""
    yield from (*product, *inputs) if spec.frugal else (*inputs, *product)


def _forward(spec: FastSpec) -> Iterator[str]:
    yield from start_text(spec)
    yield from clock_text(spec)
    if spec.cell_name == "gru":
        yield _load("bias", "bias_ptr", "unit")
    for b in range(spec.batch):
        yield _load(f"h_{b}", "h_ptr", f"{b} * H + unit")
        if spec.cell_name == "lstm":
            yield _load(f"c_{b}", "c_ptr", f"{b} * H + unit")
    yield "for step in range(steps):"
    yield from (f"    {line}" for line in _forward_step(spec))
    if spec.cell_name == "lstm":
        for b in range(spec.batch):
            yield f"gl.store(c_out_ptr + {b} * H + unit, c_{b}, mask=own)"
    yield from end_text(spec)


def _forward_step(spec: FastSpec) -> Iterator[str]:
    yield "t = steps - 1 - step" if spec.reverse else "t = step"
    yield from buffers_text(spec)
    inputs = [
        _load(f"x_{gate}_{b}", "gates_ptr", f"(t * B + {b}) * (G * H) + {gate} * H + unit")
        for b in range(spec.batch)
        for gate in range(spec.cell.gates)
    ]
    yield from _around(product_text(spec), inputs, spec)
    for b in range(spec.batch):
        yield f"# batch column {b}"
        names: dict[str, str | int] = {"b": b}
        for gate in range(spec.cell.gates):
            names |= {f"x{gate}": f"x_{gate}_{b}", f"y{gate}": f"y_{gate}_{b}"}
        text = emit_forward.CELLS[spec.cell_name].replace("tl.", "gl.")
        yield from text.format(**names).strip().splitlines()
        for place, name in enumerate(emit_forward.SAVED[spec.cell_name] if spec.save else ()):
            at = f"((t * {spec.cell.saved} + {place}) * H + unit) * B + {b}"
            yield f"gl.store(saved_ptr + {at}, {name.format(b=b)}, mask=own)"
    yield from send_text(spec, [[f"h_{b}" for b in range(spec.batch)]])
    for b in range(spec.batch):
        yield f"gl.store(out_ptr + (t * B + {b}) * H + unit, h_{b}, mask=own)"


def _backward(spec: FastSpec) -> Iterator[str]:
    lstm, gru = spec.cell_name == "lstm", spec.cell_name == "gru"
    yield from start_text(spec)
    yield from clock_text(spec)
    for b in range(spec.batch):
        if lstm:
            yield _load(f"dc_{b}", "dc_ptr", f"{b} * H + unit")
        if gru:
            yield f"direct_{b} = gl.zeros([R], gl.float32, UNIT)"
    yield "for step in range(steps):"
    yield from (f"    {line}" for line in _backward_step(spec))
    yield "now = epoch + steps"
    yield f"source = {buffer_of(spec, 'steps')}"
    yield from product_text(spec)
    for b in range(spec.batch):
        dh = f"y_0_{b} + direct_{b}" if gru else f"y_0_{b}"
        yield f"gl.store(dh_ptr + {b} * H + unit, {dh}, mask=own)"
        if lstm:
            yield f"gl.store(dc_out_ptr + {b} * H + unit, dc_{b}, mask=own)"
    yield from end_text(spec)


def _backward_step(spec: FastSpec) -> Iterator[str]:
    cell, gates = spec.cell_name, spec.cell.gates
    yield "t = step" if spec.reverse else "t = steps - 1 - step"
    yield "earlier = t + 1" if spec.reverse else "earlier = t - 1"
    yield "is_first = step == steps - 1"
    yield from buffers_text(spec)
    read = emit_backward.READ[cell]
    inputs = [line for b in range(spec.batch) for line in _inputs(spec, b, read)]
    yield from _around(product_text(spec), inputs, spec)
    for b in range(spec.batch):
        yield f"# batch column {b}"
        dh = f"y_0_{b} + dout_{b}" + (f" + direct_{b}" if cell == "gru" else "")
        yield f"dh = {dh}"
        for name in read:
            yield f"{name} = {name}_{b}"
        if cell in ("lstm", "gru"):
            yield f"before = before_{b}"
        else:
            yield f"h = h_{b}"
        text = emit_backward.CELLS[cell].replace("tl.", "gl.")
        yield from text.format(b=b).strip().splitlines()
        at = f"(t * B + {b}) * (G * H) + unit"
        for gate in range(gates):
            value = "dn" if cell == "gru" and gate == 2 else f"d{gate}_{b}"
            yield f"gl.store(dgates_ptr + {at} + {gate} * H, {value}, mask=own)"
            if spec.cell.splits:
                yield f"gl.store(drecurrent_ptr + {at} + {gate} * H, d{gate}_{b}, mask=own)"
    yield from send_text(spec, [[f"d{g}_{b}" for b in range(spec.batch)] for g in range(gates)])


def _inputs(spec: FastSpec, b: int, read: tuple[str, ...]) -> Iterator[str]:
    """What a step reads of the forward."""
    cell, saved = spec.cell_name, spec.cell.saved
    yield _load(f"dout_{b}", "dout_ptr", f"(t * B + {b}) * H + unit")
    for place, name in enumerate(read):
        at = f"((t * {saved} + {place}) * H + unit) * B + {b}"
        yield _load(f"{name}_{b}", "saved_ptr", at)
    if cell in ("rnn_tanh", "rnn_relu"):
        yield _load(f"h_{b}", "out_ptr", f"(t * B + {b}) * H + unit")
        return
    if cell == "lstm":
        at = f"((earlier * {saved} + {saved - 1}) * H + unit) * B + {b}"
        yield _load(f"before_{b}", "saved_ptr", at, "own & (is_first == 0)")
    else:
        at = f"(earlier * B + {b}) * H + unit"
        yield _load(f"before_{b}", "out_ptr", at, "own & (is_first == 0)")
    first = "c_ptr" if cell == "lstm" else "h_ptr"
    yield f"before_{b} += gl.load({first} + {b} * H + unit, mask=own & is_first, other=0.0)"
