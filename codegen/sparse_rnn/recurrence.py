"""The op ``sparse_rnn``: one layer and direction of a recurrence with a sparse recurrent matrix.

``torch.ops.graphpar_rnn.sparse_rnn`` is composed of ``recurrence``, the loop over timesteps, and
its autograd: backward runs the loop over the transposed matrix in reversed time, the gradients of
weights are products of all steps at once. The weight is a dense tensor that holds zeros, and its
gradient is dense: where a mask multiplies the weight, autograd masks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn import stepwise
from graphpar.codegen.sparse_rnn.cells import Cell, cell_of
from graphpar.codegen.sparse_rnn.kernels import active
from graphpar.errors import GraphparError, InputError

NAMESPACE = "graphpar_rnn"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "sparse_rnn(Tensor gates, Tensor weight, Tensor? bias, Tensor? projection, Tensor h, Tensor? c,"
    " str cell, bool reverse, bool strict=False) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "recurrence(Tensor gates, Tensor weight, Tensor? bias, Tensor? projection, Tensor h, Tensor? c,"
    " str cell, bool reverse, bool save, bool strict=False) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "recurrence_backward(Tensor dout, Tensor? dc, Tensor out, Tensor saved, Tensor weight,"
    " Tensor? projection, Tensor h, Tensor? c, str cell, bool reverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def sparse_rnn(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    cell: str,
    reverse: bool = False,
    strict: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A recurrence over T steps (Zhu et al. 2018, section 2; the formulas are torch.nn's).

    Args:
        gates: [T, B, G * H], the input's part of the gates: ``x W_ih^T + b_ih``.
        weight: [G * H, P], the recurrent matrix; P is H without a projection.
        bias: [G * H], the recurrent bias.
        projection: [P, H] of an LSTM with projections.
        h, c: [B, P], [B, H], the first state; ``c`` of an LSTM alone.
        cell: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        reverse: from the last step to the first.
        strict: on a GPU, raise what else is a warning where no kernel fits or runs.

    Returns:
        the states [T, B, P], the last state [B, P], and the last cell state [B, H] (of other
        cells the last state again). Types of 16 bits are computed in float32 and rounded last.
        Where a state is not finite, a zero weight gives 0, not NaN.

    Raises:
        InputError: shapes or types that do not fit. CapacityError, UnsupportedError: no kernel
            fits or runs, if ``strict``. KernelError: a launch failed.
    """
    tensors = [t for t in (gates, weight, bias, projection, h, c) if t is not None]
    save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    out, last_c, _ = torch.ops.graphpar_rnn.recurrence.default(
        gates, weight, bias, projection, h, c, cell, reverse, save, strict
    )
    last = out.select(0, 0 if reverse else out.shape[0] - 1) if out.shape[0] else h
    return out, last.clone(), last.clone() if c is None else last_c


def _check(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    cell: Cell,
) -> None:
    if gates.dim() != 3 or gates.shape[2] % cell.gates:
        raise InputError(f"{cell.name} takes gates [T, B, {cell.gates} H], not {list(gates.shape)}")
    batch, rows = gates.shape[1:]
    hidden = rows // cell.gates
    state = hidden if projection is None else projection.shape[0]
    wanted = {
        "weight": (weight, [rows, state]),
        "bias": (bias, [rows]),
        "projection": (projection, [state, hidden]),
        "h": (h, [batch, state]),
        "c": (c, [batch, hidden]),
    }
    for name, (value, shape) in wanted.items():
        if value is not None and list(value.shape) != shape:
            raise InputError(f"{name} has shape {list(value.shape)}, not {shape}")
        if value is not None and value.dtype != gates.dtype:
            raise InputError(f"{name} has type {value.dtype}, gates have {gates.dtype}")
    if (cell.name == "lstm") != (c is not None):
        raise InputError("an LSTM, and no other cell, has a cell state c")
    if projection is not None and cell.name != "lstm":
        raise InputError("only an LSTM has a projection")
    if not gates.dtype.is_floating_point:
        raise InputError(f"gates have type {gates.dtype}; legal: floating types")


def _working(dtype: torch.dtype) -> torch.dtype:
    """The type that is computed in, and that values saved for backward have."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _recurrence(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    cell: str,
    reverse: bool,
    save: bool,
    strict: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(gates, weight, bias, projection, h, c, cell_of(cell))
    given: list[Any] = [gates, weight, bias, projection, h, c]
    how: list[Any] = [cell, reverse, save]
    found = active().forward(*given, *how, *[strict])
    if found is None:
        dtype = _working(gates.dtype)
        cast: Any = [None if t is None else t.to(dtype) for t in given]
        found = stepwise.forward(*cast, *how)
    out, last_c, saved = found
    return out.to(gates.dtype), last_c.to(gates.dtype), saved


def _fake_recurrence(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    cell: str,
    reverse: bool,
    save: bool,
    strict: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = cell_of(cell)
    _check(gates, weight, bias, projection, h, c, kind)
    steps, batch, rows = gates.shape
    hidden = rows // kind.gates
    saved = (steps if save else 0, kind.saved, hidden, batch)
    return (
        gates.new_empty(steps, batch, h.shape[1]),
        gates.new_empty(0) if c is None else gates.new_empty(batch, hidden),
        gates.new_empty(saved, dtype=_working(gates.dtype)),
    )


def _recurrence_backward(
    dout: Tensor,
    dc: Tensor | None,
    out: Tensor,
    saved: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = saved.dtype
    given: list[Any] = [dout, dc, out, saved, weight, projection, h, c]
    how: list[Any] = [cell, reverse]
    found = active().backward(*given, *how)
    if found is None:
        cast: Any = [None if t is None else t.to(dtype) for t in given]
        found = stepwise.backward(*cast, *how)
    return tuple(t.to(out.dtype) for t in found)  # type: ignore[return-value]


def _fake_recurrence_backward(
    dout: Tensor,
    dc: Tensor | None,
    out: Tensor,
    saved: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    steps, batch, state = out.shape
    gates = (steps, batch, weight.shape[0])
    return (
        out.new_empty(gates),
        out.new_empty(gates if cell_of(cell).splits else 0),
        torch.empty_like(h),
        out.new_empty(0) if c is None else torch.empty_like(c),
        out.new_empty(0 if projection is None else steps, batch, state),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, bias, projection, h, c, ctx.cell, ctx.reverse, _, _ = inputs
    out, _, saved = output
    ctx.has_bias = bias is not None
    ctx.save_for_backward(weight, projection, h, c, out, saved)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: Tensor | None, dc: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    weight, projection, h, c, out, saved = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dgates, drecurrent, dh, dc, dstates = torch.ops.graphpar_rnn.recurrence_backward.default(
        dout, None if c is None else dc, out, saved, weight, projection, h, c, ctx.cell, ctx.reverse
    )
    drecurrent = drecurrent if drecurrent.numel() else dgates
    wanted = ctx.needs_input_grad
    dweight = dbias = dprojection = None
    if wanted[1]:
        before = (out[1:], h[None]) if ctx.reverse else (h[None], out[:-1])
        dweight = drecurrent.flatten(0, 1).t() @ torch.cat(before)[: len(out)].flatten(0, 1)
    if wanted[2] and ctx.has_bias:
        dbias = drecurrent.sum((0, 1))
    if wanted[3] and projection is not None:
        _, _, _, o, c_all = saved.unbind(1)
        states = (o * c_all.tanh()).transpose(1, 2).to(out.dtype)  # T, B, H
        dprojection = dstates.flatten(0, 1).t() @ states.flatten(0, 1)
    dc = dc if c is not None else None
    return dgates, dweight, dbias, dprojection, dh, dc, None, None, None, None


def _no_second(ctx: Any, *grads: Tensor | None) -> Any:
    raise GraphparError(
        "sparse_rnn has no second derivative: transform the model with sparse_rnn=False"
    )


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


_library.impl("sparse_rnn", sparse_rnn, "CompositeImplicitAutograd")
_library.impl("recurrence", _recurrence, "CompositeExplicitAutograd")
_library.impl("recurrence_backward", _recurrence_backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::recurrence", _fake_recurrence, lib=_library)
torch.library.register_fake(
    f"{NAMESPACE}::recurrence_backward", _fake_recurrence_backward, lib=_library
)
torch.library.register_autograd(
    f"{NAMESPACE}::recurrence", _gradients, setup_context=_setup, lib=_library
)
torch.library.register_autograd(
    f"{NAMESPACE}::recurrence_backward", _no_second, setup_context=_nothing, lib=_library
)
