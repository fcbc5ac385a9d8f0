"""The text of the backward kernel: the transposed pattern, in reversed time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphpar.codegen.sparse_rnn.emit_common import product_text, send_text, weights_text
from graphpar.codegen.sparse_rnn.spec import KernelSpec

ARGUMENTS = (
    "value_ptr", "column_ptr", "slot_ptr", "unit_ptr", "dout_ptr", "dc_ptr", "out_ptr", "saved_ptr",
    "h_ptr", "c_ptr", "exchange_ptr", "clock_ptr", "counter_ptr", "error_ptr",
    "dgates_ptr", "drecurrent_ptr", "dh_ptr", "dc_out_ptr",
    "steps",
)  # fmt: skip

# dh: the gradient of the state of batch column b; dG_b: of the pre-activation of gate G.
CELLS: Mapping[str, str] = {
    "lstm": """
tc = tanh(c)
dc_{b} += dh * o * (1.0 - tc * tc)
d0_{b} = dc_{b} * g * i * (1.0 - i)
d1_{b} = dc_{b} * before * f * (1.0 - f)
d2_{b} = dc_{b} * i * (1.0 - g * g)
d3_{b} = dh * tc * o * (1.0 - o)
dc_{b} = dc_{b} * f
""",
    "gru": """
dn = dh * (1.0 - z) * (1.0 - n * n)
d0_{b} = dn * y * r * (1.0 - r)
d1_{b} = dh * (before - n) * z * (1.0 - z)
d2_{b} = dn * r
direct_{b} = dh * z
""",
    "rnn_tanh": """
d0_{b} = dh * (1.0 - h * h)
""",
    "rnn_relu": """
d0_{b} = tl.where(h > 0, dh, 0.0)
""",
}
READ: Mapping[str, tuple[str, ...]] = {
    "lstm": ("i", "f", "g", "o", "c"),
    "gru": ("r", "z", "n", "y"),
    "rnn_tanh": (),
    "rnn_relu": (),
}


def backward_text(spec: KernelSpec) -> Iterator[str]:
    """The body of the kernel, line by line.

    ``dout`` is [T, B, H], ``dc`` [B, H]; the gradients of gates are [T, B, G H], apart for the
    input's and the hidden state's part of a GRU. The exchange holds zeros of the first epoch.
    """
    lstm, gru = spec.cell_name == "lstm", spec.cell_name == "gru"
    yield from weights_text(spec)
    for b in range(spec.batch):
        if lstm:
            yield f"dc_{b} = tl.load(dc_ptr + {b} * H + unit, mask=own, other=0.0)"
        if gru:
            yield f"direct_{b} = tl.zeros([R], tl.float32)"
    yield "for step in range(steps):"
    yield from (f"    {line}" for line in _step(spec))
    yield "now = epoch + steps"
    yield "source = exchange_ptr + (steps & 1) * (W * N)"
    yield from product_text(spec, "source", "now")
    for b in range(spec.batch):
        dh = f"y_0_{b} + direct_{b}" if gru else f"y_0_{b}"
        yield f"tl.store(dh_ptr + {b} * H + unit, {dh}, mask=own)"
        if lstm:
            yield f"tl.store(dc_out_ptr + {b} * H + unit, dc_{b}, mask=own)"


def _step(spec: KernelSpec) -> Iterator[str]:
    cell, saved = spec.cell_name, spec.cell.saved
    yield "t = step" if spec.reverse else "t = steps - 1 - step"
    yield "earlier = t + 1" if spec.reverse else "earlier = t - 1"
    yield "is_first = step == steps - 1"
    yield "now = epoch + step"
    yield "source = exchange_ptr + (step & 1) * (W * N)"
    yield "target = exchange_ptr + ((step + 1) & 1) * (W * N)"
    yield from product_text(spec, "source", "now")
    for b in range(spec.batch):
        yield f"# batch column {b}"
        yield f"dh = y_0_{b} + tl.load(dout_ptr + (t * B + {b}) * H + unit, mask=own, other=0.0)"
        if cell == "gru":
            yield f"dh += direct_{b}"
        for place, name in enumerate(READ[cell]):
            at = f"((t * {saved} + {place}) * H + unit) * B + {b}"
            yield f"{name} = tl.load(saved_ptr + {at}, mask=own, other=0.0)"
        if cell in ("rnn_tanh", "rnn_relu"):
            yield f"h = tl.load(out_ptr + (t * B + {b}) * H + unit, mask=own, other=0.0)"
        elif cell == "lstm":
            at = f"((earlier * {saved} + {saved - 1}) * H + unit) * B + {b}"
            yield from _before("saved_ptr + " + at, f"c_ptr + {b} * H + unit")
        else:
            yield from _before(
                f"out_ptr + (earlier * B + {b}) * H + unit", f"h_ptr + {b} * H + unit"
            )
        yield from CELLS[cell].format(b=b).strip().splitlines()
        at = f"(t * B + {b}) * (G * H) + unit"
        for gate in range(spec.cell.gates):
            value = "dn" if cell == "gru" and gate == 2 else f"d{gate}_{b}"
            yield f"tl.store(dgates_ptr + {at} + {gate} * H, {value}, mask=own)"
            if spec.cell.splits:
                yield f"tl.store(drecurrent_ptr + {at} + {gate} * H, d{gate}_{b}, mask=own)"
    names = [[f"d{gate}_{b}" for b in range(spec.batch)] for gate in range(spec.cell.gates)]
    yield from send_text(spec, "target", names, "(now + 1)")


def _before(computed: str, given: str) -> Iterator[str]:
    """The state before step t: computed, or at the first step given."""
    yield f"before = tl.load({computed}, mask=own & (is_first == 0), other=0.0)"
    yield f"before += tl.load({given}, mask=own & is_first, other=0.0)"
