"""The recurrence without a kernel of its own: one sparse product of the library per step.

Legend of the suffixes: T steps, G gates, H hidden units, P units of the state that recurs (the
projection's, else H), B batch, S saved values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.pattern import Patterns

PATTERNS = Patterns()


def _multiply(matrix: Tensor, x: Tensor, addend: Tensor | None) -> Tensor:
    """``addend`` + ``matrix`` ``x``, of [columns, B] and [rows, B] (or [rows, 1])."""
    if x.shape[1] == 1:  # the library's product with a vector is faster
        vector = x[:, 0]
        if addend is None:
            return torch.mv(matrix, vector)[:, None]
        return torch.addmv(addend[:, 0], matrix, vector)[:, None]
    x = x.contiguous()
    return matrix @ x if addend is None else torch.addmm(addend, matrix, x)


def _times(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def forward(
    gates_TBG: Tensor,
    weight_GP: Tensor,
    bias_G: Tensor | None,
    projection_PH: Tensor | None,
    h_BP: Tensor,
    c_BH: Tensor | None,
    cell_name: str,
    reverse: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The states [T, B, P], the last cell state [B, H] and the saved values [T, S, H, B].

    All in the type of the operands, float32 or float64.
    """
    cell = cell_of(cell_name)
    steps, batch, rows = gates_TBG.shape
    hidden = rows // cell.gates
    pattern, values = PATTERNS.of(weight_GP)
    matrix = pattern.matrix(values)
    bias_G1 = None if bias_G is None else bias_G[:, None]
    gates = gates_TBG.transpose(1, 2).contiguous()
    if bias_G1 is not None and not cell.splits:
        gates += bias_G1
    sizes = cell.gates, hidden, batch
    h, c = h_BP.t(), None if c_BH is None else c_BH.t()
    out = gates.new_empty(steps, batch, h_BP.shape[1])
    saved = gates.new_empty(steps if save else 0, cell.saved, hidden, batch)
    for t in _times(steps, reverse):
        if cell.splits:
            part = None if bias_G1 is None else bias_G1.expand(rows, batch)
            recurrent = _multiply(matrix, h, part)
            step = cell.forward(gates[t].view(sizes), recurrent.view(sizes), h, c, save)
        else:
            step = cell.forward(None, _multiply(matrix, h, gates[t]).view(sizes), h, c, save)
        h, c = step.h, step.c
        if projection_PH is not None:
            h = projection_PH @ h
        out[t] = h.t()
        if save and step.saved is not None:
            saved[t] = step.saved
    last = gates.new_empty(0) if c is None else c.t().contiguous()
    return out, last, saved


def backward(
    dout_TBP: Tensor,
    dc_BH: Tensor | None,
    out_TBP: Tensor,
    saved_TSHB: Tensor,
    weight_GP: Tensor,
    projection_PH: Tensor | None,
    h_BP: Tensor,
    c_BH: Tensor | None,
    cell_name: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of: the gates' input part [T, B, G H], their recurrent part (empty where it is the
    same), the first state [B, P], the first cell state [B, H] (empty without one), and the
    projected states [T, B, P] (empty without a projection)."""
    cell = cell_of(cell_name)
    steps, batch, _ = out_TBP.shape
    rows = weight_GP.shape[0]
    pattern, values = PATTERNS.of(weight_GP)
    matrix = pattern.transpose(values)
    dgates = out_TBP.new_empty(steps, batch, rows)
    drecurrent = out_TBP.new_empty(steps, batch, rows) if cell.splits else out_TBP.new_empty(0)
    dstates = out_TBP.new_empty(0 if projection_PH is None else steps, *out_TBP.shape[1:])
    dh = torch.zeros_like(h_BP).t()
    dc = None if c_BH is None else torch.zeros_like(c_BH).t() if dc_BH is None else dc_BH.t()
    order = _times(steps, not reverse)
    for place, t in enumerate(order):
        before = order[place + 1] if place + 1 < steps else None
        previous_h = h_BP.t() if before is None else out_TBP[before].t()
        if c_BH is None:
            previous_c = None
        else:
            previous_c = c_BH.t() if before is None else saved_TSHB[before, -1]
        dh = dh + dout_TBP[t].t()
        if projection_PH is not None:
            dstates[t] = dh.t()
            dh = projection_PH.t() @ dh
        step = cell.backward(
            dh,
            dc,
            saved_TSHB[t] if cell.saved else saved_TSHB,
            out_TBP[t].t(),
            previous_c,
            previous_h,
        )
        dgates[t] = step.gates.view(rows, batch).t()
        if cell.splits:
            drecurrent[t] = step.recurrent.view(rows, batch).t()
        dh = _multiply(matrix, step.recurrent.view(rows, batch), step.h)
        dc = step.c
    first_c = out_TBP.new_empty(0) if dc is None else dc.t().contiguous()
    return dgates, drecurrent, dh.t().contiguous(), first_c, dstates
