"""Deal the non-zeros of each row to its slots, bank by bank.

Threads of one pass are conflict-free at a step if they read different banks. Over all steps that
is possible if no bank has more non-zeros in a pass's threads than there are steps, so every row
gives its non-zeros of a bank to those of its slots whose pass has fewest of that bank yet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphpar.codegen.sparse_rnn.layout import Layout


def deal(row_banks: NDArray[np.integer], layout: Layout, lanes: int) -> NDArray[np.int32]:
    """How many non-zeros of each bank each slot gets; the slots of a row are filled evenly.

    Args:
        row_banks: [programs, rows, banks], non-zeros of each row in each bank.

    Returns:
        [programs, threads, banks]
    """
    programs, rows, banks = row_banks.shape
    groups = layout.threads // lanes
    width = layout.slots.shape[2]
    loads = np.zeros((programs, groups, banks), np.int32)
    dealt = np.zeros((programs, layout.threads, banks), np.int32)
    every = np.arange(programs)[:, None]
    far = np.int64(1 << 40)
    place = np.broadcast_to(np.arange(width), (programs, width))
    rank = np.empty((programs, width), np.int64)
    for row in range(rows):
        threads = layout.slots[:, row]
        count = layout.counts[:, row, None]
        empty = place >= count
        group = threads // lanes
        mine = np.zeros((programs, width, banks), np.int32)
        filled = np.where(empty, far, 0)
        base, rest = np.divmod(row_banks[:, row], np.maximum(count, 1))
        # Banks with much to deal first: the last ones only fill up.
        for bank in range(banks):
            load = loads[every, group, bank]
            order = np.argsort(filled * 4096 + load, axis=1, kind="stable")
            np.put_along_axis(rank, order, place, axis=1)
            share = base[:, bank, None] + (rank < rest[:, bank, None])
            share[empty] = 0
            mine[:, :, bank] = share
            filled += share
        dealt_row = np.where(empty[:, :, None], 0, mine)
        np.add.at(loads, (every, group), dealt_row)
        dealt[every, threads] += dealt_row
    return dealt
