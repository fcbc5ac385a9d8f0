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
    state = _State(left)
    out = np.full((layout.depth, lanes * groups), PAD, np.int32)
    row = np.repeat(np.arange(lanes) * banks * groups, groups)
    for step in range(layout.depth):
        bank = _match(state, layout.depth - step, step)
        reads = np.flatnonzero(bank >= 0)
        cells = (bank * groups + np.arange(groups)).reshape(-1)[reads]
        at = cells + row[reads]
        number = following.reshape(-1)[at]
        out[step, reads] = number
        following.reshape(-1)[at] = number + 1
        state.take(reads, cells, at)
    found = out.reshape(layout.depth, lanes, programs, threads // lanes)
    return found.transpose(2, 0, 3, 1).reshape(programs, layout.depth, threads)


class _State:
    """What is not read yet, of [lanes, banks, groups].

    ``left``: non-zeros. ``some``: all bits set where there are any; ``has``: [lanes, groups], a bit
    for each such bank. ``todo``: [lanes, groups], of all banks; ``total``: [banks, groups], of all
    lanes.
    """

    def __init__(self, left: Counts) -> None:
        self.left = left
        self.some = -(left > 0).astype(np.int16)
        bits = np.int64(1) << np.arange(left.shape[1])
        self.has = np.einsum("lbg,b->lg", left > 0, bits)
        self.todo = left.sum(axis=1, dtype=np.int16)
        self.total = left.sum(axis=0, dtype=np.int32)
        # Of a bank's total and its name one number is made, of 16 bits where they suffice.
        small = int(self.total.max(initial=0)) < (1 << 15) // left.shape[1] - 1
        self.key_type = np.int16 if small else np.int32
        self.some = self.some.astype(self.key_type, copy=False)

    def take(
        self, reads: NDArray[np.int64], cells: NDArray[np.int64], at: NDArray[np.int64]
    ) -> None:
        """Lanes and groups ``reads`` read one of banks and groups ``cells`` each, which is the
        place ``at``."""
        rest = self.left.reshape(-1)[at] - 1
        self.left.reshape(-1)[at] = rest
        self.todo.reshape(-1)[reads] -= 1
        self.total -= np.bincount(cells, minlength=self.total.size).reshape(self.total.shape)
        gone = rest == 0
        self.some.reshape(-1)[at[gone]] = 0
        banks = cells[gone] // self.total.shape[1]
        self.has.reshape(-1)[reads[gone]] ^= np.int64(1) << banks


def _match(state: _State, steps: int, turn: int) -> NDArray[np.int64]:
    """The bank that each lane reads now, [lanes, groups]; -1 for none.

    Args:
        steps: that are left, this one included; ``turn`` rotates who chooses first.
    """
    lanes, banks, groups = state.left.shape
    names, every = np.arange(banks)[:, None], np.arange(groups)
    # The key of a bank that is taken is 0. A row more, for lanes that find none.
    key = np.zeros((banks + 1, groups), state.key_type)
    key[:banks] = state.total * banks + (names + turn % banks) % banks
    bank = np.empty((lanes, groups), np.int64)
    keys = np.empty((banks, groups), state.key_type)
    for place in range(lanes):
        lane = (place + turn) % lanes
        np.bitwise_and(key[:banks], state.some[lane], out=keys)
        best = keys.max(axis=0)
        found = np.where(best > 0, (best.astype(np.int64) - turn) % banks, banks)
        key[found, every] = 0
        bank[lane] = found
    bank[bank == banks] = -1
    behind = (bank < 0) & (state.todo >= steps) & (state.todo > 0)
    free = _bits(key[:banks] > 0)
    for lane in np.flatnonzero(behind.any(axis=1)):
        _take_over(state, free, bank, int(lane), np.flatnonzero(behind[lane]))
    return bank


def _bits(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """A bit for each of [banks, groups]."""
    found: NDArray[np.int64] = np.einsum("bg,b->g", flags, np.int64(1) << np.arange(len(flags)))
    return found


def _take_over(
    state: _State,
    free: NDArray[np.int64],
    bank: NDArray[np.int64],
    lane: int,
    groups: NDArray[np.int64],
) -> None:
    """Give ``lane`` a bank in each of ``groups``, where it found none; ``free``: bits of banks."""
    lanes, banks, _ = state.left.shape
    here, names = np.arange(len(groups)), np.arange(banks)[:, None]
    wanted = (state.has[lane, groups] >> names & 1) > 0  # banks, groups
    held = bank[:, groups]
    owner = np.full((banks + 1, len(groups)), lane)
    owner[held, here] = np.arange(lanes)[:, None]  # of none, -1, the row more
    # where the owner of each bank may go
    moves = state.has[owner[:banks], groups] & free[groups]
    total = state.total[:, groups]
    choice = np.where(wanted & (moves != 0), total + 1, 0).argmax(axis=0)
    goals = np.where(wanted, moves, 0)[choice, here]
    moved = goals != 0
    g, b, goals = groups[moved], choice[moved], goals[moved]
    lowest = goals & -goals
    bank[owner[b, here[moved]], g] = np.log2(lowest).astype(np.int64)
    free[g] ^= lowest
    bank[lane, g] = b
    rest = ~moved
    double = np.where(wanted, total, -1).argmax(axis=0)
    bank[lane, groups[rest]] = double[rest]
