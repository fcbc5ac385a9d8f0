"""Pack a sparse recurrent matrix into the words that a persistent kernel keeps on chip.

A word of a 16-bit value holds <value, column>, value above (Zhu et al. 2018, section 3: index and
value side by side); a 32-bit value has its column in an array of its own. Slots, banks and their
order: :mod:`layout`, :mod:`deal`, :mod:`order`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpar.codegen.sparse_rnn.banks import lanes_per_pass, wavefronts_per_load
from graphpar.codegen.sparse_rnn.deal import deal
from graphpar.codegen.sparse_rnn.layout import (
    Layout,
    deal_units,
    needed_depth,
    place_rows,
    row_counts,
)
from graphpar.codegen.sparse_rnn.order import PAD, order
from graphpar.errors import CapacityError, InputError

MAX_COLUMNS = 1 << 16
VALUE_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix of [gates * units, columns].

    Attributes:
        layout: where rows lie.
        source: int64 [programs, KT, threads], the place of each value in the flattened matrix; a
            padding word repeats a place and is marked in ``padding``.
        padding: bool, like ``source``.
        columns: int32, like ``source``; padding reads a column that its neighbours read anyway.
        values: of the values' type, like ``source``; 0 where padding is.
        shape: of the matrix.
        gates: rows of each unit.
    """

    layout: Layout
    source: Tensor
    padding: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]
    gates: int

    @property
    def words(self) -> Tensor:
        """int32, like ``source``: <16-bit value, 16-bit column>, value in the upper half.

        Raises:
            InputError: the values have 32 bits.
        """
        if self.values.dtype.itemsize != 2:
            raise InputError(f"{self.values.dtype} values do not fit 16 bits")
        return (self.values.view(torch.int16).int() << 16) | self.columns

    def dense(self) -> Tensor:
        """The matrix, in the type of the values."""
        found = self.values.new_zeros(self.shape[0] * self.shape[1])
        kept = ~self.padding
        found[self.source[kept]] = self.values[kept]
        return found.view(self.shape)

    def wavefronts(self, *, load_bytes: int = 8) -> float:
        """Modelled wavefronts of a warp's gather; see :mod:`banks`."""
        return wavefronts_per_load(self.columns.numpy(), load_bytes=load_bytes)


def check_values(weight: Tensor, value_type: torch.dtype) -> None:
    """Raise what :func:`pack` raises of a matrix."""
    if value_type not in VALUE_TYPES:
        known = ", ".join(map(str, VALUE_TYPES))
        raise InputError(f"values of type {value_type} cannot be packed; legal: {known}")
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise InputError(f"no floating matrix: {weight.dtype}{list(weight.shape)}")
    if weight.is_meta:
        raise InputError("the recurrent weight is on the meta device: it has no values to pack")
    if weight.shape[1] > MAX_COLUMNS:
        raise CapacityError(f"{weight.shape[1]} columns: a 16-bit index counts {MAX_COLUMNS}")
    if not bool(torch.isfinite(weight.detach()).all()):
        raise InputError("the recurrent weight has values that are not finite")


def pack(
    weight: Tensor,
    *,
    gates: int,
    programs: int,
    threads: int,
    value_type: torch.dtype,
    depth: int | None = None,
    slots_per_row: int = 32,
    load_bytes: int = 8,
    bank_aware: bool = True,
) -> Packed:
    """Pack the non-zeros of ``weight`` for ``programs`` blocks of ``threads`` threads.

    Args:
        weight: [gates * units, columns], rows ordered by gate.
        depth: KT, non-zeros per slot; by default the least that fits.
        load_bytes: bytes that a thread gathers of a column, for the order of banks.
        bank_aware: False leaves the non-zeros of a row in order.

    Raises:
        CapacityError: more columns than 16 bits count, or ``depth`` is too small.
        InputError: a matrix without values, not finite, or of a wrong type.
    """
    check_values(weight, value_type)
    matrix = weight.detach().cpu().contiguous()
    columns = matrix.shape[1]
    lanes = lanes_per_pass(load_bytes)
    mask = (matrix != 0).numpy()
    banks = _by_bank(mask, lanes)  # rows, banks, columns of the bank
    row_banks = np.count_nonzero(banks, axis=2)
    nonzeros = row_banks.sum(axis=1).reshape(gates, -1)
    units = deal_units(nonzeros.sum(axis=0), programs)
    counts = row_counts(nonzeros, units)
    least = needed_depth(counts, threads, slots_per_row)
    if depth is not None and depth < least:
        raise CapacityError(f"slots of {depth} non-zeros do not hold the rows: {least} would")
    depth = depth or least
    layout = place_rows(counts, units, depth=depth, threads=threads, lanes=lanes)
    places = np.flatnonzero(banks)  # in order of row, bank, column
    numbers = _arrange(layout, row_banks, gates, lanes) if bank_aware else None
    if numbers is None:
        numbers, places = _in_order(layout, nonzeros, gates), np.flatnonzero(mask)
    else:
        width = banks.shape[2]
        column = (np.arange(width) * lanes + np.arange(lanes)[:, None]).reshape(-1)
        row = np.repeat(np.arange(len(banks)), row_banks.sum(axis=1))
        places = row * columns + column[places - row * len(column)]
    return _assemble(matrix, layout, numbers, places, gates, value_type, lanes)


def repack(packed: Packed, weight: Tensor) -> bool:
    """Write the values of ``weight`` into ``packed``, in place.

    Returns:
        Whether the pattern stands: ``False`` if ``weight`` has non-zeros elsewhere; then nothing
        is written.
    """
    flat = weight.detach().reshape(-1)
    values = flat[packed.source].masked_fill_(packed.padding, 0)
    if int(torch.count_nonzero(values)) != int(torch.count_nonzero(flat)):
        return False
    packed.values.copy_(values)
    return True


def _by_bank(mask: NDArray[np.bool_], banks: int) -> NDArray[np.bool_]:
    rows, columns = mask.shape
    wide = np.pad(mask, ((0, 0), (0, -columns % banks)))
    return np.ascontiguousarray(wide.reshape(rows, -1, banks).transpose(0, 2, 1))


def _row_table(layout: Layout, gates: int, units: int) -> NDArray[np.int64]:
    """[programs, rows], the matrix row of each of a program's rows; ``gates * units`` for none."""
    rows = np.arange(gates)[:, None] * units + layout.units[:, None, :]
    return np.where(layout.units[:, None, :] < 0, gates * units, rows).reshape(len(rows), -1)


def _arrange(
    layout: Layout, row_banks: NDArray[np.integer], gates: int, lanes: int
) -> NDArray[np.int32]:
    """Numbers of the non-zeros, in order of row, bank and column, at [programs, KT, threads]."""
    rows = _row_table(layout, gates, len(row_banks) // gates)
    padded = np.pad(row_banks, ((0, 1), (0, 0)))
    dealt = deal(padded[rows], layout, lanes)
    start = np.zeros(padded.size + 1, np.int64)
    np.cumsum(padded.reshape(-1), out=start[1:])
    start = start[:-1].reshape(padded.shape)
    programs, threads, banks = dealt.shape
    first = np.zeros((programs, threads, banks), np.int64)
    every = np.arange(programs)[:, None]
    following = start[rows]
    for slot in range(layout.slots.shape[2]):
        thread = layout.slots[:, :, slot]
        first[every, thread] = following
        following = following + dealt[every, thread]
    return order(dealt, first, layout, lanes)


def _in_order(layout: Layout, nonzeros: NDArray[np.integer], gates: int) -> NDArray[np.int32]:
    """Numbers of the non-zeros, in order of row and column, at [programs, KT, threads]."""
    rows = _row_table(layout, gates, nonzeros.shape[1])
    counts = np.append(nonzeros.reshape(-1), 0)
    start = np.cumsum(counts) - counts
    slot = np.arange(layout.slots.shape[2])[:, None]
    number = np.arange(layout.depth) * layout.counts[:, :, None, None] + slot
    there = (slot < layout.counts[:, :, None, None]) & (number < counts[rows][:, :, None, None])
    program, row, slot, step = np.nonzero(there)
    out = np.full((len(rows), layout.depth, layout.threads), PAD, np.int32)
    thread = layout.slots[program, row, slot]
    out[program, step, thread] = start[rows][program, row] + number[there]
    return out


def _assemble(
    matrix: Tensor,
    layout: Layout,
    numbers: NDArray[np.int32],
    places: NDArray[np.int64],
    gates: int,
    value_type: torch.dtype,
    lanes: int,
) -> Packed:
    padding = numbers == PAD
    # A padding word takes the number of a lane of its pass that is none, if there is one.
    passes = numbers.reshape(-1, lanes)
    numbers = np.where(passes == PAD, passes.max(axis=1)[:, None], passes).reshape(numbers.shape)
    if len(places):
        source = places[np.maximum(numbers, 0)]
    else:
        source = np.zeros(numbers.shape, np.int64)
    columns = (source % matrix.shape[1]).astype(np.int32)
    where, pads = torch.from_numpy(source), torch.from_numpy(padding)
    if matrix.numel():
        values = matrix.reshape(-1)[where].masked_fill_(pads, 0).to(value_type)
    else:
        values = torch.zeros(numbers.shape, dtype=value_type)
    shape = (matrix.shape[0], matrix.shape[1])
    return Packed(layout, where, pads, torch.from_numpy(columns), values, shape, gates)
