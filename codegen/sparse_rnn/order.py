"""Order the non-zeros inside slots so that the threads of a pass hit different banks.

At each step a thread reads one of its non-zeros, in a bank of its choice: a matching of threads
and banks, found for all passes of all programs at once. Each thread takes the free bank that has
most left; one that found none takes over the bank of a thread that can move to a free one; one
that still has none waits, if it has steps to spare, else it reads a bank that is taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphpar.codegen.sparse_rnn.layout import Layout

PAD = -1
Counts = NDArray[np.int16]


def order(
    dealt: NDArray[np.int32], first: NDArray[np.int64], layout: Layout, lanes: int
) -> NDArray[np.int32]:
    """The non-zero that each slot reads at each step.

    Args:
        dealt: [programs, threads, banks], non-zeros of each bank in each slot.
        first: like ``dealt``: the number of the first of them; they are numbered in sequence.

    Returns:
        [programs, depth, threads], numbers of non-zeros, or ``PAD``.
    """
    programs, threads, banks = dealt.shape
    groups = programs * threads // lanes

    def by_lane(values: NDArray[np.integer]) -> NDArray[np.integer]:
        return values.reshape(groups, lanes, banks).transpose(1, 2, 0)  # lanes, banks, groups

    left = np.ascontiguousarray(by_lane(dealt), dtype=np.int16)
    following = np.ascontiguousarray(by_lane(first), dtype=np.int32)
    todo = left.sum(axis=1, dtype=np.int16)
    out = np.full((layout.depth, lanes * groups), PAD, np.int32)
    row = np.arange(lanes)[:, None] * banks
    for step in range(layout.depth):
        bank = _match(left, todo, layout.depth - step, step)
        reads = np.flatnonzero(bank >= 0)
        at = ((row + bank) * groups + np.arange(groups)).reshape(-1)[reads]
        number = following.reshape(-1)[at]
        out[step, reads] = number
        following.reshape(-1)[at] = number + 1
        left.reshape(-1)[at] -= 1
        todo.reshape(-1)[reads] -= 1
    found = out.reshape(layout.depth, lanes, programs, threads // lanes)
    return found.transpose(2, 0, 3, 1).reshape(programs, layout.depth, threads)


def _match(left: Counts, todo: Counts, steps: int, turn: int) -> NDArray[np.int64]:
    """The bank that each lane reads now, [lanes, groups]; -1 for none.

    Args:
        left: [lanes, banks, groups], non-zeros not read yet; ``todo``: all banks of them.
        steps: that are left, this one included; ``turn`` rotates who chooses first.
    """
    lanes, banks, groups = left.shape
    total = left.sum(axis=0, dtype=np.int32)
    small = int(total.max(initial=0)) < (1 << 15) // banks - 1
    names = np.arange(banks, dtype=np.int16 if small else np.int32)[:, None]
    none = names.min() - 1
    key = total.astype(names.dtype) * banks + (names + turn % banks) % banks
    free = np.ones((banks, groups), bool)
    bank = np.full((lanes, groups), -1, np.int64)
    for place in range(lanes):
        lane = (place + turn) % lanes
        best = np.where((left[lane] > 0) & free, key, none).max(axis=0)
        found = np.where(best >= 0, (best - turn % banks) % banks, none)
        free &= names != found
        bank[lane] = found
    behind = (bank < 0) & (todo >= steps) & (todo > 0)
    for lane in np.flatnonzero(behind.any(axis=1)):
        _take_over(left, free, bank, int(lane), np.flatnonzero(behind[lane]), total)
    return bank


def _take_over(
    left: Counts,
    free: NDArray[np.bool_],
    bank: NDArray[np.int64],
    lane: int,
    groups: NDArray[np.int64],
    total: NDArray[np.int32],
) -> None:
    """Give ``lane`` a bank in each of ``groups``, where it found none."""
    lanes, banks, _ = left.shape
    here = np.arange(len(groups))
    wanted = left[lane][:, groups] > 0  # banks, groups
    owner = np.full((banks, len(groups)), lane)
    for other in range(lanes):
        held = bank[other, groups]
        has = held >= 0
        owner[held[has], here[has]] = other
    # where the owner of each bank may go: banks, other banks, groups
    moves = (left[owner[:, None], np.arange(banks)[:, None], groups] > 0) & free[:, groups]
    can = wanted & moves.any(axis=1)
    choice = np.where(can, total[:, groups] + 1, 0).argmax(axis=0)
    moved = can[choice, here]
    g, b = groups[moved], choice[moved]
    goal = moves[b, :, here[moved]].argmax(axis=1)
    bank[owner[b, here[moved]], g] = goal
    free[goal, g] = False
    bank[lane, g] = b
    rest = ~moved
    double = np.where(wanted, total[:, groups], -1).argmax(axis=0)
    bank[lane, groups[rest]] = double[rest]
