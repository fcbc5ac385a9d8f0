"""What a fast kernel's block may hold, and how it is cut into launches and pieces.

How many words stay in registers is probed: see ``register_words``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP
from graphpar.codegen.sparse_rnn.register_words import REGISTER_WORDS

Value = Literal["bf16", "fp16", "fp32"]
"""Type of weights and of what blocks exchange."""
COLUMNS: Mapping[Value, int] = {"bf16": 4, "fp16": 4, "fp32": 2}
"""Batch columns that one gather of 64 bits serves."""
BYTES: Mapping[Value, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SLOTS_PER_ROW = 32
MAX_BATCH = 8
_MOST_CHUNKS = 3
_LEAST_CHUNK = 64
LINE = 32
"""Elements of 64 bits in a line of shared memory: what lies in it starts with one."""
_MOST_RECEIVED, _FRUGALLY_RECEIVED = 8, 2  # elements of a piece that a thread receives

CELLS = ("lstm", "gru", "rnn")
WARPS = (8, 16)
SEGMENTS = (1, 2, 4)
_FEWER_UNPROBED = 16  # for one slot of a thread, or four: as many words as probed would spill
PROBED_SLOTS = 64, 8
"""Rows of a block and slots of a row with which words in registers were probed."""


def register_words(
    cell: str,
    part: str,
    value: Value,
    warps: int,
    columns: int,
    *,
    frugal: bool = False,
    tiles: int = 0,
    segments: int = 1,
) -> int:
    """The most non-zeros of a thread that stay in registers over the time loop.

    Args:
        columns: batch columns of the launch. frugal: see :class:`FastSpec`.
        tiles: slots whose sums a thread reads for a gate; each has a register with its place.
        segments: slots of a thread; probed with two of them.
    """
    name = cell.partition("_")[0]
    known = REGISTER_WORDS.get((part, value, warps, frugal, name), (0, 0, 0))
    gates = cell_of(cell).gates if part == "forward" else 1
    more = max(0, tiles - PROBED_SLOTS[0] * PROBED_SLOTS[1] // (warps * WARP))
    fewer = gates * more
    if value != "fp32" and columns > 2 and segments != 2:
        fewer += _FEWER_UNPROBED
    return max(0, known[(columns > 2) + (columns > 4)] - fewer)


def element_bytes(value: Value, batch: int) -> int:
    """What a gather brings: 32 bits where that is enough for the batch, else 64."""
    return 4 if batch <= COLUMNS[value] // 2 else 8


def slices_of(batch: int, most: int = MAX_BATCH) -> tuple[int, ...]:
    """The batch columns of each launch, about equally many."""
    launches = -(-batch // most)
    return tuple(batch // launches + (i < batch % launches) for i in range(launches))


def chunks_of(elements: int, threads: int, *, frugal: bool = False) -> tuple[tuple[int, int], ...]:
    """(start, size) of the pieces, powers of two, in which a block receives the elements.

    A thread holds all of a piece's words that it reads, before it waits for them: few, or they
    take the registers of weights.
    """
    size = -(-elements // _LEAST_CHUNK) * _LEAST_CHUNK
    while size.bit_count() > _MOST_CHUNKS:
        size += size & -size
    found, start = [], 0
    most = (_FRUGALLY_RECEIVED if frugal else _MOST_RECEIVED) * threads
    for bit in range(size.bit_length() - 1, -1, -1):
        piece = min(1 << bit, most)
        for _ in range((size & 1 << bit) // piece):
            found.append((start, piece))
            start += piece
    return tuple(found)


def states_length(elements: int) -> int:
    """How many of them a block receives."""
    return sum(size for _, size in chunks_of(elements, WARP))
