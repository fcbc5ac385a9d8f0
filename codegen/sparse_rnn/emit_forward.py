"""The text of the forward kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphpar.codegen.sparse_rnn.emit_common import product_text, send_text, weights_text
from graphpar.codegen.sparse_rnn.spec import KernelSpec

ARGUMENTS = (
    "value_ptr", "column_ptr", "slot_ptr", "unit_ptr", "gates_ptr", "bias_ptr", "h_ptr", "c_ptr",
    "exchange_ptr", "clock_ptr", "counter_ptr", "error_ptr", "out_ptr", "c_out_ptr", "saved_ptr",
    "steps",
)  # fmt: skip

# x: the input's part of a gate, y: the hidden state's part, both of batch column b.
CELLS: Mapping[str, str] = {
    "lstm": """
i = sigmoid({x0} + {y0})
f = sigmoid({x1} + {y1})
g = tanh({x2} + {y2})
o = sigmoid({x3} + {y3})
c_{b} = f * c_{b} + i * g
h_{b} = o * tanh(c_{b})
""",
    "gru": """
r = sigmoid({x0} + {y0})
z = sigmoid({x1} + {y1})
y = {y2} + bias
n = tanh({x2} + r * y)
h_{b} = (1.0 - z) * n + z * h_{b}
""",
    "rnn_tanh": """
h_{b} = tanh({x0} + {y0})
""",
    "rnn_relu": """
sum = {x0} + {y0}
h_{b} = tl.where(sum <= 0, 0.0, sum)
""",
}
SAVED: Mapping[str, tuple[str, ...]] = {
    "lstm": ("i", "f", "g", "o", "c_{b}"),
    "gru": ("r", "z", "n", "y"),
    "rnn_tanh": (),
    "rnn_relu": (),
}


def forward_text(spec: KernelSpec) -> Iterator[str]:
    """The body of the kernel, line by line.

    Gates are [T, B, G H], states [B, H], the output [T, B, H], saved values [T, S, H, B].
    """
    lstm = spec.cell_name == "lstm"
    yield from weights_text(spec)
    if spec.cell_name == "gru":
        yield "bias = tl.load(bias_ptr + unit, mask=own, other=0.0)"
    for b in range(spec.batch):
        yield f"h_{b} = tl.load(h_ptr + {b} * H + unit, mask=own, other=0.0)"
        if lstm:
            yield f"c_{b} = tl.load(c_ptr + {b} * H + unit, mask=own, other=0.0)"
    yield "for step in range(steps):"
    yield from (f"    {line}" for line in _step(spec))
    if lstm:
        for b in range(spec.batch):
            yield f"tl.store(c_out_ptr + {b} * H + unit, c_{b}, mask=own)"


def _step(spec: KernelSpec) -> Iterator[str]:
    yield "t = steps - 1 - step" if spec.reverse else "t = step"
    yield "now = epoch + step"
    yield "source = exchange_ptr + (step & 1) * (W * N)"
    yield "target = exchange_ptr + ((step + 1) & 1) * (W * N)"
    yield from product_text(spec, "source", "now")
    for b in range(spec.batch):
        yield f"# batch column {b}"
        yield f"at = (t * B + {b}) * (G * H) + unit"
        names: dict[str, str | int] = {"b": b}
        for gate in range(spec.gates):
            names[f"y{gate}"] = f"y_{gate}_{b}"
            names[f"x{gate}"] = f"x{gate}"
            yield f"x{gate} = tl.load(gates_ptr + at + {gate} * H, mask=own, other=0.0)"
        yield from CELLS[spec.cell_name].format(**names).strip().splitlines()
        if spec.state == "bf16":
            yield f"h_{b} = widened(half(h_{b}))"
        yield f"tl.store(out_ptr + (t * B + {b}) * H + unit, h_{b}, mask=own)"
        for place, name in enumerate(SAVED[spec.cell_name] if spec.save else ()):
            at = f"((t * {spec.cell.saved} + {place}) * H + unit) * B + {b}"
            yield f"tl.store(saved_ptr + {at}, {name.format(b=b)}, mask=own)"
    yield from send_text(spec, "target", [[f"h_{b}" for b in range(spec.batch)]], "(now + 1)")
