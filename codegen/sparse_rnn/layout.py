"""Which program, and which of its slots, holds each row of a sparse matrix.

A *program* (one block of threads) owns some units; a unit has one row per gate. Rows are cut into
*slots* of at most ``depth`` non-zeros; each thread keeps one slot for all timesteps. The last
thread's slot is always empty: the reduction of a row's slots reads it where a row has fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpar.errors import CapacityError

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where rows lie.

    Attributes:
        units: [programs, units per program], the units that each program owns, -1 for none.
        slots: [programs, rows per program, slots per row], the threads that hold each row's
            slots, rows ordered by gate, then unit; the last thread where there is none.
        counts: [programs, rows per program], slots of each row.
        depth: non-zeros per slot, KT.
        threads: slots per program.
    """

    units: Ints
    slots: Ints
    counts: Ints
    depth: int
    threads: int


def deal_units(nonzeros: NDArray[np.integer], programs: int) -> Ints:
    """Units for each program, so that programs hold about equally many non-zeros.

    Args:
        nonzeros: [units], of all gates together.

    Returns:
        [programs, ceil(units / programs)]; units ascend within a program, -1 stands last.
    """
    count = len(nonzeros)
    rows = -(-count // programs)
    order = np.full(rows * programs, count, np.int64)
    order[:count] = np.argsort(-nonzeros, kind="stable")
    table = order.reshape(rows, programs)
    table[1::2] = table[1::2, ::-1]  # heavy with light, in turn
    units = np.sort(table.T, axis=1)
    return np.where(units == count, -1, units).astype(np.int32)


def row_counts(nonzeros: NDArray[np.integer], units: Ints) -> NDArray[np.int64]:
    """Non-zeros of each program's rows: [gates, units] to [programs, gates * units a program]."""
    padded = np.pad(nonzeros, ((0, 0), (0, 1)))  # -1 reads the empty unit
    return padded[:, units].transpose(1, 0, 2).reshape(len(units), -1)


def needed_depth(counts: NDArray[np.integer], threads: int, slots_per_row: int) -> int:
    """The least KT with which every program's rows fit its slots.

    Args:
        counts: [programs, rows], non-zeros.

    Raises:
        CapacityError: a program has more non-empty rows than slots.
    """
    most = int((counts > 0).sum(axis=1).max(initial=0))
    if most > threads - 1:
        raise CapacityError(f"{most} rows in a program of {threads} slots: use more programs")
    low, high = 1, max(1, int(counts.max(initial=0)))
    while low < high:
        depth = (low + high) // 2
        slots = -(-counts // depth)
        if slots.sum(axis=1).max() <= threads - 1 and slots.max() <= slots_per_row:
            high = depth
        else:
            low = depth + 1
    return low


def place_rows(
    counts: NDArray[np.integer], units: Ints, *, depth: int, threads: int, lanes: int
) -> Layout:
    """Give each row its slots. Consecutive slots lie in different groups of ``lanes`` threads, so
    that a row's non-zeros of one bank can be spread over the groups."""
    slots = -(-counts // depth)
    most = int(slots.max(initial=1))
    start = np.cumsum(slots, axis=1) - slots
    if int((start + slots).max(initial=0)) > threads - 1:
        raise CapacityError(f"{threads - 1} slots of {depth} non-zeros do not hold the rows")
    number = start[:, :, None] + np.arange(max(most, 1))
    groups = threads // lanes
    thread = number % groups * lanes + number // groups
    there = np.arange(max(most, 1)) < slots[:, :, None]
    table = np.where(there, thread, threads - 1).astype(np.int32)
    return Layout(units, table, slots.astype(np.int32), depth, threads)
