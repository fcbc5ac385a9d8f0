"""Plan of a persistent kernel: how many blocks, threads and words, and the modelled time.

The times are a model from instruction and wavefront counts, unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP, Device
from graphpar.codegen.sparse_rnn.layout import deal_units, needed_depth, row_counts
from graphpar.codegen.sparse_rnn.limits import (
    BYTES,
    COLUMNS,
    MAX_BATCH,
    REGISTER_WORDS,
    SLOTS_PER_ROW,
    Value,
    chunks_of,
    register_words,
    slices_of,
    states_length,
)
from graphpar.codegen.sparse_rnn.pack import MAX_COLUMNS
from graphpar.codegen.sparse_rnn.spec import PartName, power_of_two
from graphpar.errors import CapacityError

_INSTRUCTIONS = 9  # of a warp for one non-zero and four batch columns
_ISSUE = 4  # instructions a multiprocessor starts per clock
_WAVEFRONTS = 2.3  # of a bank-aware gather of 64 bits
_FIXED_CLOCKS: Mapping[int, int] = {8: 900, 16: 1750}  # check of the poll, reduction, cell
_EXCHANGE_CLOCKS = 900  # store, L2, poll
_PIECE_CLOCKS = 700  # a further piece of the states is asked for when the one before has come
_L2_CLOCK_BYTES = 64  # a multiprocessor reads of L2 in a clock
_DENSE_STEP_US = 1.0  # start and synchronisation of a dense step


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a kernel is cut.

    Attributes:
        warps: of a block. shared_words: of each thread's non-zeros, those in shared memory.
        columns: batch columns of a launch, at most.
    """

    warps: int
    shared_words: int = 0
    columns: int = MAX_BATCH


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel for one recurrent matrix.

    Attributes:
        part: "forward", or "backward", whose matrix is the transpose.
        hidden, batch: of the recurrence. value: type of weights and states.
        programs: blocks, each on a multiprocessor of its own.
        rows, slots: units of a block and slots of a row, at most, as powers of two.
        shape: warps, non-zeros in shared memory, batch columns of a launch.
        depth: KT, non-zeros per thread.
        shared_bytes: of a block, all in all.
        parts_us: modelled microseconds of a step: gather, fixed work, exchange.
        dense_us: those of a step that reads the dense matrix.
    """

    cell: str
    part: PartName
    device: Device
    hidden: int
    batch: int
    value: Value
    programs: int
    rows: int
    slots: int
    shape: Shape
    depth: int
    shared_bytes: int
    parts_us: Mapping[str, float]
    dense_us: float

    @property
    def warps(self) -> int:
        return self.shape.warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def shared_words(self) -> int:
        return self.shape.shared_words

    @property
    def register_words(self) -> int:
        return self.depth - self.shared_words

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())

    @property
    def speedup(self) -> float:
        """Modelled, over a dense step."""
        return self.dense_us / self.step_us


def own_bytes(columns: int, batch: int, warps: int, value: Value) -> int:
    """Shared memory that a block needs beside weights: the states, and a sum for each slot."""
    passes = -(-batch // COLUMNS[value])
    return 8 * passes * states_length(columns) + 8 * -(-batch // 2) * warps * WARP


def plan_kernel(
    cell: str,
    nonzeros: NDArray[np.integer],
    columns: int,
    *,
    batch: int,
    device: Device,
    value: Value = "bf16",
    part: PartName = "forward",
) -> Plan:
    """The plan with the least modelled time that fits on the device.

    Args:
        nonzeros: [gates, units], of each row; in backward [1, units].
        columns: of the matrix: what each step exchanges.
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
    words = 2 if value == "fp32" else 1
    plans: list[Plan] = []
    lacks: dict[int, tuple[float, str]] = {}  # by warps, the share that fits, and a reason
    for warps in REGISTER_WORDS[part, value]:
        try:
            depth = needed_depth(counts, warps * WARP, SLOTS_PER_ROW)
        except CapacityError as error:
            lacks[warps] = 0.0, str(error)
            continue
        for launch in sorted({slices_of(batch, n)[0] for n in (8, 4, 2, 1)}, reverse=True):
            most = register_words(cell, part, value, warps, launch)
            if not most:
                continue
            own = own_bytes(columns, launch, warps, value)
            in_registers = min(depth, most)
            room = (device.shared_bytes - own) // (4 * words * warps * WARP)
            if own > device.shared_bytes or depth - in_registers > room:
                held = in_registers + max(room, 0)
                why = (
                    f"{warps} warps need {depth} non-zeros per thread, of which {in_registers} fit "
                    f"registers and {room} shared memory"
                )
                if own > device.shared_bytes:
                    have = f"{device.shared_bytes:,} of shared memory"
                    held, why = 0, f"the states of {columns} units take {own:,} bytes, of {have}"
                lacks[warps] = max(lacks.get(warps, (-1.0, "")), (held / depth, why))
                continue
            shared = depth - in_registers
            slices = slices_of(batch, launch)
            parts = _parts_us(warps, depth, shared * words, columns, slices, value, device)
            plans.append(
                Plan(
                    cell_of(cell).name,
                    part,
                    device,
                    count,
                    batch,
                    value,
                    programs,
                    power_of_two(units.shape[1]),
                    power_of_two(int((-(-counts // depth)).max(initial=1))),
                    Shape(warps=warps, shared_words=shared, columns=launch),
                    depth,
                    own + 4 * words * shared * warps * WARP,
                    parts,
                    _dense_us(gates * count * columns * BYTES[value], device),
                )
            )
    if not plans:
        share, _ = max(lacks.values())
        reasons = "; ".join(dict.fromkeys(why for _, why in lacks.values()))
        would = _would_fit(nonzeros, columns, share) if share else ""
        raise CapacityError(f"does not fit on {device.name}: {reasons}{would}")
    return min(plans, key=lambda plan: plan.step_us)


def _would_fit(nonzeros: NDArray[np.integer], columns: int, share: float) -> str:
    """What would fit in place of a matrix, if a share of its non-zeros does."""
    density = share * int(nonzeros.sum()) / (nonzeros.size * columns)
    units = int(nonzeros.shape[1] * share**0.5)
    return f"; a density of about {density:.1%} would fit, or about {units} units at this one"


def _parts_us(
    warps: int,
    depth: int,
    shared: int,
    columns: int,
    slices: tuple[int, ...],
    value: Value,
    device: Device,
) -> dict[str, float]:
    passes = -(-slices[0] // COLUMNS[value])
    gathers = warps * depth * passes
    issue = gathers * _INSTRUCTIONS / _ISSUE
    banks = gathers * _WAVEFRONTS + warps * shared
    volume = columns * slices[0] * 2 * BYTES[value]  # each word carries its epoch
    pieces = passes * len(chunks_of(columns, warps * WARP)) - 1
    clocks = {
        "gather": max(issue, banks),
        "fixed": float(_FIXED_CLOCKS[warps] * passes),
        "exchange": _EXCHANGE_CLOCKS + max(_PIECE_CLOCKS * pieces, volume / _L2_CLOCK_BYTES),
    }
    return {name: len(slices) * c / device.clocks_per_us for name, c in clocks.items()}


def _dense_us(nbytes: int, device: Device) -> float:
    rate = device.l2_bytes_per_us if nbytes <= device.l2_bytes else device.memory_bytes_per_us
    return _DENSE_STEP_US + nbytes / rate
