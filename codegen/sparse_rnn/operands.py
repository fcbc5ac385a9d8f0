"""The operands of a launch, by the names that the kernels' arguments have.

Shapes: T steps, B batch, G gates, H units, S saved values, N what a column exchanges at a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import Cell
from graphpar.codegen.sparse_rnn.layout import Layout

RESULTS = {
    "forward": ("out_ptr", "c_out_ptr", "saved_ptr"),
    "backward": ("dgates_ptr", "drecurrent_ptr", "dh_ptr", "dc_out_ptr"),
}


def row_tables(layout: Layout, gates: int, rows: int, slots: int) -> tuple[Tensor, Tensor]:
    """Each row's slots [blocks, G, ``rows``, ``slots``], padded with the last slot, and each
    block's units [blocks, ``rows``], padded with -1."""
    table = torch.from_numpy(layout.slots).unflatten(1, (gates, -1))
    more = (0, slots - table.shape[3], 0, rows - table.shape[2])
    units = torch.from_numpy(layout.units)
    return (
        F.pad(table, more, value=layout.threads - 1).contiguous(),
        F.pad(units, (0, rows - units.shape[1]), value=-1).contiguous(),
    )


def forward_operands(
    cell: Cell, gates: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None, *, save: bool
) -> dict[str, Tensor]:
    """Gates [T, B, G * H], recurrent bias [G * H], states [B, H]; memory for the states
    [T, B, H], the last cell state [B, H] and, to ``save``, [T, S, H, B].

    Of the bias the kernel adds the last gate's; the others are added to the gates.
    """
    steps, batch, _ = gates.shape
    hidden = h.shape[1]
    own = h.new_zeros(hidden)
    if bias is not None:
        added, own = bias, bias[-hidden:]
        if cell.splits:
            added = torch.cat((bias[:-hidden], torch.zeros_like(own)))
        gates = gates + added
    return {
        "gates_ptr": gates.contiguous(),
        "bias_ptr": own.contiguous(),
        "h_ptr": h.contiguous(),
        "c_ptr": h if c is None else c.contiguous(),
        "out_ptr": h.new_empty(steps, batch, hidden),
        "c_out_ptr": torch.empty_like(h),
        "saved_ptr": h.new_empty(steps if save else 0, cell.saved, hidden, batch),
    }


def backward_operands(
    cell: Cell,
    dout: Tensor,
    dc: Tensor | None,
    out: Tensor,
    saved: Tensor,
    h: Tensor,
    c: Tensor | None,
) -> dict[str, Tensor]:
    """What forward gave and the gradients of its results; memory for the gradients of the gates'
    input part and recurrent part [T, B, G * H] (one tensor unless the cell splits them), the first
    state and the first cell state [B, H]."""
    steps, batch, hidden = out.shape
    dgates = out.new_empty(steps, batch, cell.gates * hidden)
    return {
        "dout_ptr": dout.contiguous(),
        "dc_ptr": torch.zeros_like(h) if dc is None else dc.contiguous(),
        "out_ptr": out,
        "saved_ptr": saved,
        "h_ptr": h.contiguous(),
        "c_ptr": h if c is None else c.contiguous(),
        "dgates_ptr": dgates,
        "drecurrent_ptr": torch.empty_like(dgates) if cell.splits else dgates,
        "dh_ptr": torch.empty_like(h),
        "dc_out_ptr": torch.empty_like(h),
    }
