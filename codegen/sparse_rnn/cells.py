"""The cells: names, sizes and the formulas of one step, forward and backward.

Legend of the suffixes: G gates, H hidden units, B batch. Gates are ordered as in torch.nn: LSTM
i, f, g, o; GRU r, z, n. ``recurrent_GHB`` is the hidden state's part of the pre-activations with
its bias. A cell that just adds the input's part gets it added; the GRU gets it as ``gates_GHB``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphpar.errors import InputError


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gives.

    ``saved`` is what backward needs, [S, H, B]; ``c`` is the cell state of an LSTM, else ``None``.
    """

    h: Tensor
    c: Tensor | None
    saved: Tensor | None


@dataclass(frozen=True, slots=True)
class StepGradient:
    """Gradients of one step.

    ``gates`` of the input's part, ``recurrent`` of the hidden state's part (the same tensor but
    for the GRU), ``h`` of the previous state, directly (not through the product), ``c`` of the
    previous cell state.
    """

    gates: Tensor
    recurrent: Tensor
    h: Tensor | None
    c: Tensor | None


Forward = Callable[["Tensor | None", Tensor, Tensor, "Tensor | None", bool], Step]
Backward = Callable[
    [Tensor, "Tensor | None", Tensor, Tensor, "Tensor | None", Tensor], StepGradient
]


@dataclass(frozen=True, slots=True)
class Cell:
    """``gates`` rows per unit, ``saved`` values per unit and step kept for backward.

    ``splits``: whether the input's and the hidden state's part of a gate are not just added.
    """

    name: str
    gates: int
    saved: int
    forward: Forward
    backward: Backward
    splits: bool = False


def _lstm(
    gates_GHB: Tensor | None,
    recurrent_GHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    save: bool,
) -> Step:
    assert c_HB is not None
    i, f, g, o = recurrent_GHB.unbind()
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = torch.addcmul(i * g, f, c_HB)
    saved = torch.stack((i, f, g, o, c)) if save else None
    return Step(o * c.tanh(), c, saved)


def _lstm_backward(
    dh_HB: Tensor,
    dc_HB: Tensor | None,
    saved_SHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    previous_h_HB: Tensor,
) -> StepGradient:
    assert c_HB is not None
    assert dc_HB is not None
    i, f, g, o, c = saved_SHB.unbind()
    tanh_c = c.tanh()
    dc = dc_HB + dh_HB * o * (1 - tanh_c * tanh_c)
    dz = torch.stack(
        (
            dc * g * i * (1 - i),
            dc * c_HB * f * (1 - f),
            dc * i * (1 - g * g),
            dh_HB * tanh_c * o * (1 - o),
        )
    )
    return StepGradient(dz, dz, None, dc * f)


def _gru(
    gates_GHB: Tensor | None,
    recurrent_GHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    save: bool,
) -> Step:
    assert gates_GHB is not None
    r, z = (gates_GHB[:2] + recurrent_GHB[:2]).sigmoid().unbind()
    n = torch.addcmul(gates_GHB[2], r, recurrent_GHB[2]).tanh()
    saved = torch.stack((r, z, n, recurrent_GHB[2])) if save else None
    return Step(torch.lerp(n, h_HB, z), None, saved)


def _gru_backward(
    dh_HB: Tensor,
    dc_HB: Tensor | None,
    saved_SHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    previous_h_HB: Tensor,
) -> StepGradient:
    r, z, n, y = saved_SHB.unbind()
    dn = dh_HB * (1 - z) * (1 - n * n)
    dr = dn * y * r * (1 - r)
    dz = dh_HB * (previous_h_HB - n) * z * (1 - z)
    return StepGradient(torch.stack((dr, dz, dn)), torch.stack((dr, dz, dn * r)), dh_HB * z, None)


def _rnn_tanh(
    gates_GHB: Tensor | None,
    recurrent_GHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    save: bool,
) -> Step:
    return Step(recurrent_GHB[0].tanh(), None, None)


def _rnn_tanh_backward(
    dh_HB: Tensor,
    dc_HB: Tensor | None,
    saved_SHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    previous_h_HB: Tensor,
) -> StepGradient:
    dz = (dh_HB * (1 - h_HB * h_HB))[None]
    return StepGradient(dz, dz, None, None)


def _rnn_relu(
    gates_GHB: Tensor | None,
    recurrent_GHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    save: bool,
) -> Step:
    return Step(recurrent_GHB[0].relu(), None, None)


def _rnn_relu_backward(
    dh_HB: Tensor,
    dc_HB: Tensor | None,
    saved_SHB: Tensor,
    h_HB: Tensor,
    c_HB: Tensor | None,
    previous_h_HB: Tensor,
) -> StepGradient:
    dz = (dh_HB * (h_HB > 0))[None]
    return StepGradient(dz, dz, None, None)


CELLS: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell("lstm", 4, 5, _lstm, _lstm_backward),
        Cell("gru", 3, 4, _gru, _gru_backward, splits=True),
        Cell("rnn_tanh", 1, 0, _rnn_tanh, _rnn_tanh_backward),
        Cell("rnn_relu", 1, 0, _rnn_relu, _rnn_relu_backward),
    )
}


def cell_of(name: str) -> Cell:
    """A cell by its name, that of the aten op.

    Raises:
        InputError: an unknown name.
    """
    if name not in CELLS:
        raise InputError(f"no cell is named {name!r}; known: {', '.join(CELLS)}")
    return CELLS[name]
