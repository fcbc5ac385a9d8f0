"""Plan of a persistent kernel: how many blocks, threads and words, and the modelled time.

The limits of words in registers are those that compile without spills (see the static checks);
the times are a model from instruction and wavefront counts, unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP, Device
from graphpar.codegen.sparse_rnn.layout import deal_units, needed_depth, row_counts
from graphpar.codegen.sparse_rnn.pack import MAX_COLUMNS
from graphpar.codegen.sparse_rnn.spec import power_of_two
from graphpar.errors import CapacityError

REGISTER_WORDS: Mapping[int, Mapping[str, tuple[int, int]]] = {
    8: {"lstm": (160, 152), "gru": (160, 160), "rnn_tanh": (160, 160), "rnn_relu": (160, 160)},
    16: {"lstm": (64, 24), "gru": (68, 48), "rnn_tanh": (80, 76), "rnn_relu": (80, 76)},
}
"""By warps and cell, the most words of a thread that stay in registers over the time loop, for a
batch of up to 4 and up to 8: found by compiling (``test_full_sizes``)."""
SLOTS_PER_ROW = 32
MAX_BATCH = 8
Value = Literal["bf16", "fp16", "fp32"]
COLUMNS: Mapping[Value, int] = {"bf16": 4, "fp16": 4, "fp32": 2}
"""Batch columns that one gather of 64 bits serves, by the type of weights and states."""
_BYTES: Mapping[Value, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
_MOST_CHUNKS = 3
_LEAST_CHUNK = 64
_MOST_RECEIVED = 8  # elements of a piece that a thread receives
_INSTRUCTIONS = 9  # of a warp for one non-zero and four batch columns
_ISSUE = 4  # instructions a multiprocessor starts per clock
_WAVEFRONTS = 2.3  # of a bank-aware gather of 64 bits
_FIXED_CLOCKS: Mapping[int, int] = {8: 900, 16: 1750}  # check of the poll, reduction, cell
_EXCHANGE_CLOCKS = 900  # store, L2, poll
_L2_CLOCK_BYTES = 64  # a multiprocessor reads of L2 in a clock
_DENSE_STEP_US = 1.0  # start and synchronisation of a dense step


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel for one recurrent matrix.

    Attributes:
        hidden, batch: of the recurrence; a launch takes at most ``MAX_BATCH`` columns.
        value: type of weights and states.
        programs: blocks, each on a multiprocessor of its own.
        rows, slots: units of a block and slots of a row, at most, as powers of two.
        warps: of a block. ``depth``: KT, non-zeros per thread.
        register_words, shared_words: words of a thread in registers, and in shared memory.
        shared_bytes: of a block, all in all.
        parts_us: modelled microseconds of a step: gather, fixed work, exchange.
        dense_us: those of a step that reads the dense matrix.
    """

    cell: str
    device: Device
    hidden: int
    batch: int
    value: Value
    programs: int
    rows: int
    slots: int
    warps: int
    depth: int
    register_words: int
    shared_words: int
    shared_bytes: int
    parts_us: Mapping[str, float]
    dense_us: float

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())

    @property
    def speedup(self) -> float:
        """Modelled, over a dense step."""
        return self.dense_us / self.step_us


def slices_of(batch: int) -> tuple[int, ...]:
    """The batch columns of each launch, about equally many."""
    launches = -(-batch // MAX_BATCH)
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


def plan_kernel(
    cell: str,
    nonzeros: NDArray[np.integer],
    columns: int,
    *,
    batch: int,
    device: Device,
    value: Value = "bf16",
) -> Plan:
    """The plan with the least modelled time that fits on the device.

    Args:
        nonzeros: [gates, units], of each row.
        columns: of the matrix, the units that each step exchanges.
        value: type of weights and states; the index of an fp32 weight takes a word of its own.

    Raises:
        CapacityError: nothing fits; the message says what would.
    """
    if columns > MAX_COLUMNS:
        raise CapacityError(f"{columns} columns: a 16-bit index counts {MAX_COLUMNS}")
    gates, count = nonzeros.shape
    programs = min(device.multiprocessors, count)
    units = deal_units(nonzeros.sum(axis=0), programs)
    counts = row_counts(nonzeros, units)
    plans, lacks = [], []
    for warps in REGISTER_WORDS:
        try:
            depth = needed_depth(counts, warps * WARP, SLOTS_PER_ROW)
        except CapacityError as error:
            lacks.append(str(error))
            continue
        words = 2 if value == "fp32" else 1
        slices = slices_of(batch)
        passes = -(-slices[0] // COLUMNS[value])
        own = 8 * passes * states_length(columns) + 8 * -(-slices[0] // 2) * warps * WARP
        most = REGISTER_WORDS[warps][cell][min(passes, 2) - 1]
        in_registers = min(depth, most // words)
        room = max(0, device.shared_bytes - own) // (4 * words * warps * WARP)
        if own > device.shared_bytes or depth - in_registers > room:
            held = (in_registers + room) * warps * WARP * programs
            lacks.append(
                f"{warps} warps need {depth} non-zeros per thread, of which {in_registers} fit "
                f"registers and {room} shared memory: about {held:,} of "
                f"{int(nonzeros.sum()):,} non-zeros"
            )
            continue
        shared = depth - in_registers
        parts = _parts_us(warps, depth, shared * words, passes, columns, slices, value, device)
        dense_bytes = gates * count * columns * _BYTES[value]
        plans.append(
            Plan(
                cell_of(cell).name,
                device,
                count,
                batch,
                value,
                programs,
                power_of_two(units.shape[1]),
                power_of_two(int((-(-counts // depth)).max(initial=1))),
                warps,
                depth,
                in_registers,
                shared,
                own + 4 * words * shared * warps * WARP,
                parts,
                _dense_us(dense_bytes, device),
            )
        )
    if not plans:
        raise CapacityError(f"does not fit on {device.name}: {'; '.join(lacks)}")
    return min(plans, key=lambda plan: plan.step_us)


def _parts_us(
    warps: int,
    depth: int,
    shared: int,
    passes: int,
    columns: int,
    slices: tuple[int, ...],
    value: Value,
    device: Device,
) -> dict[str, float]:
    gathers = warps * depth * passes
    issue = gathers * _INSTRUCTIONS / _ISSUE
    banks = gathers * _WAVEFRONTS + warps * shared
    volume = columns * slices[0] * 2 * _BYTES[value]  # each word carries its epoch
    clocks = {
        "gather": max(issue, banks),
        "fixed": float(_FIXED_CLOCKS[warps] * passes),
        "exchange": _EXCHANGE_CLOCKS + volume / _L2_CLOCK_BYTES,
    }
    return {name: len(slices) * c / device.clocks_per_us for name, c in clocks.items()}


def _dense_us(nbytes: int, device: Device) -> float:
    rate = device.l2_bytes_per_us if nbytes <= device.l2_bytes else device.memory_bytes_per_us
    return _DENSE_STEP_US + nbytes / rate
