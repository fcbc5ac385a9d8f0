"""What a fast kernel's block may hold, and how it is cut into launches and pieces.

The limits of words in registers are those that compile without spills (``test_full_sizes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from graphpar.codegen.sparse_rnn.devices import WARP
from graphpar.codegen.sparse_rnn.spec import power_of_two

Value = Literal["bf16", "fp16", "fp32"]
"""Type of weights and of what blocks exchange."""
COLUMNS: Mapping[Value, int] = {"bf16": 4, "fp16": 4, "fp32": 2}
"""Batch columns that one gather of 64 bits serves."""
BYTES: Mapping[Value, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SLOTS_PER_ROW = 32
MAX_BATCH = 8
_MOST_CHUNKS = 3
_LEAST_CHUNK = 64
_MOST_RECEIVED = 8  # elements of a piece that a thread receives

REGISTER_WORDS: Mapping[tuple[str, Value], Mapping[int, Mapping[str, tuple[int, int, int]]]] = {
    ("forward", "bf16"): {
        8: {"lstm": (160, 160, 152), "gru": (160, 160, 160), "rnn": (160, 160, 160)},
        16: {"lstm": (64, 64, 24), "gru": (68, 68, 48), "rnn": (80, 80, 76)},
    },
    ("backward", "bf16"): {
        8: {"lstm": (144, 144, 0), "gru": (136, 112, 0), "rnn": (160, 160, 0)},
        16: {"lstm": (20, 20, 0), "gru": (0, 0, 0), "rnn": (72, 72, 0)},
    },
    ("forward", "fp16"): {
        8: {"lstm": (160, 160, 152), "gru": (160, 160, 160), "rnn": (160, 160, 160)},
        16: {"lstm": (64, 64, 24), "gru": (68, 68, 48), "rnn": (80, 80, 76)},
    },
    ("backward", "fp16"): {
        8: {"lstm": (144, 144, 0), "gru": (136, 112, 0), "rnn": (160, 160, 0)},
        16: {"lstm": (20, 20, 0), "gru": (0, 0, 0), "rnn": (64, 64, 0)},
    },
    ("forward", "fp32"): {
        8: {"lstm": (80, 80, 72), "gru": (80, 80, 80), "rnn": (80, 80, 80)},
        16: {"lstm": (28, 28, 12), "gru": (32, 32, 20), "rnn": (40, 40, 32)},
    },
    ("backward", "fp32"): {
        8: {"lstm": (32, 0, 0), "gru": (20, 0, 0), "rnn": (44, 28, 0)},
        16: {"lstm": (8, 0, 0), "gru": (8, 0, 0), "rnn": (12, 0, 0)},
    },
}
"""By part, type, warps and cell, the most non-zeros of a thread that stay in registers over the
time loop, in launches of up to 2, 4 and 8 batch columns; 0 where even few do not."""


def register_words(cell: str, part: str, value: Value, warps: int, columns: int) -> int:
    """The limit of :data:`REGISTER_WORDS` for launches of ``columns`` batch columns."""
    cells = REGISTER_WORDS[part, value][warps]
    return cells[cell.partition("_")[0]][(columns > 2) + (columns > 4)]


def slices_of(batch: int, most: int = MAX_BATCH) -> tuple[int, ...]:
    """The batch columns of each launch, about equally many."""
    launches = -(-batch // most)
    return tuple(batch // launches + (i < batch % launches) for i in range(launches))


def chunks_of(elements: int, threads: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the pieces, powers of two, in which a block receives the elements.

    A thread holds all of a piece's words that it reads, before it waits for them: few, or they
    take the registers of weights.
    """
    size = -(-elements // _LEAST_CHUNK) * _LEAST_CHUNK
    while size.bit_count() > _MOST_CHUNKS:
        size += size & -size
    found, start, most = [], 0, _MOST_RECEIVED * threads
    for bit in range(size.bit_length() - 1, -1, -1):
        piece = min(1 << bit, most)
        for _ in range((size & 1 << bit) // piece):
            found.append((start, piece))
            start += piece
    return tuple(found)


def states_length(elements: int) -> int:
    """The array of them in shared memory, whose length is a power of two."""
    return power_of_two(sum(size for _, size in chunks_of(elements, WARP)))
