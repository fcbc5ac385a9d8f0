"""Plan of a persistent kernel: how many blocks, threads and words, and the modelled time.

The times are a model from instruction and wavefront counts, unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.devices import WARP, Device
from graphpar.codegen.sparse_rnn.layout import deal_units, needed_depth, row_counts
from graphpar.codegen.sparse_rnn.limits import (
    BYTES,
    COLUMNS,
    MAX_BATCH,
    SEGMENTS,
    SLOTS_PER_ROW,
    WARPS,
    Value,
    chunks_of,
    element_bytes,
    register_words,
    slices_of,
    states_length,
)
from graphpar.codegen.sparse_rnn.pack import MAX_COLUMNS
from graphpar.codegen.sparse_rnn.spec import PartName, power_of_two
from graphpar.errors import CapacityError

_INSTRUCTIONS = {4: 6, 8: 9}  # of a warp for a non-zero and an element of so many bytes
_ISSUE = 4  # instructions a multiprocessor starts per clock
_WAVEFRONTS = {4: 1.2, 8: 2.3}  # of a bank-aware gather of so many bytes
_FIXED_CLOCKS: Mapping[int, int] = {8: 900, 16: 1750}  # check of the poll, reduction, cell
_EXCHANGE_CLOCKS = 900  # store, L2, poll
_PIECE_CLOCKS = 700  # a further piece of the states is asked for when the one before has come
_L2_CLOCK_BYTES = 64  # a multiprocessor reads of L2 in a clock
_SUM_INSTRUCTIONS = 3  # of a warp, to read and add the sum of a slot for two columns
_DENSE_STEP_US = 1.0  # start and synchronisation of a dense step


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a kernel is cut.

    Attributes:
        warps: of a block. shared_words: of each thread's non-zeros, those in shared memory.
        columns: batch columns of a launch, at most.
        segments: slots that a thread works one after another: rows are cut finer with more.
        frugal: fewer registers for all but words; see :class:`FastSpec`.
    """

    warps: int
    shared_words: int = 0
    columns: int = MAX_BATCH
    segments: int = 1
    frugal: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel for one recurrent matrix.

    Attributes:
        part: "forward", or "backward", whose matrix is the transpose.
        hidden, batch: of the recurrence. value: type of weights and states.
        programs: blocks, each on a multiprocessor of its own.
        rows, slots: units of a block and slots of a row, at most, as powers of two.
        shape: warps, non-zeros in shared memory, batch columns of a launch.
        depth: KT, non-zeros per slot.
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
    def block_slots(self) -> int:
        return self.threads * self.shape.segments

    @property
    def words(self) -> int:
        """Non-zeros of a thread."""
        return self.depth * self.shape.segments

    @property
    def shared_words(self) -> int:
        return self.shape.shared_words

    @property
    def register_words(self) -> int:
        return self.words - self.shared_words

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())

    @property
    def speedup(self) -> float:
        """Modelled, over a dense step."""
        return self.dense_us / self.step_us


def own_bytes(columns: int, batch: int, slots: int, value: Value) -> int:
    """Shared memory that a block needs beside weights: the states, and a sum for each slot."""
    each = element_bytes(value, batch)
    passes = -(-batch // (COLUMNS[value] * each // 8))
    length = states_length(columns)
    if passes > 1:
        length = power_of_two(length)
    return each * passes * length + 8 * -(-batch // 2) * slots


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
    fixed = _Fixed(
        cell_of(cell).name, part, device, count, batch, value, programs, units.shape[1], columns,
        _dense_us(gates * count * columns * BYTES[value], device),
    )  # fmt: skip
    plans: list[Plan] = []
    lacks: dict[int, tuple[float, str]] = {}  # by warps, the share that fits, and a reason
    launches = sorted({slices_of(batch, n)[0] for n in (8, 4, 2, 1)}, reverse=True)
    for warps, segments in product(WARPS, SEGMENTS):
        try:
            depth = needed_depth(counts, warps * WARP * segments, SLOTS_PER_ROW)
        except CapacityError as error:
            lacks.setdefault(warps, (0.0, str(error)))
            continue
        most = int((-(-counts // depth)).max(initial=1))
        for launch, frugal in product(launches, (False, True)):
            shape = Shape(warps=warps, columns=launch, segments=segments, frugal=frugal)
            found = _planned(fixed, shape, depth, power_of_two(most))
            if isinstance(found, Plan):
                plans.append(found)
            else:
                lacks[warps] = max(lacks.get(warps, (-1.0, "")), found)
    if not plans:
        share, _ = max(lacks.values())
        reasons = "; ".join(dict.fromkeys(why for _, why in lacks.values()))
        would = _would_fit(nonzeros, columns, share) if share else ""
        raise CapacityError(f"does not fit on {device.name}: {reasons}{would}")
    return min(plans, key=lambda plan: plan.step_us)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What all plans for a matrix share; ``units`` of a block."""

    cell: str
    part: PartName
    device: Device
    hidden: int
    batch: int
    value: Value
    programs: int
    units: int
    columns: int
    dense_us: float


def _planned(fixed: _Fixed, shape: Shape, depth: int, slots: int) -> Plan | tuple[float, str]:
    """A plan, or the share of the words that fits and why no more."""
    value, device, launch = fixed.value, fixed.device, shape.columns
    threads, words = shape.warps * WARP, depth * shape.segments
    rows = power_of_two(fixed.units)
    most = register_words(
        fixed.cell, fixed.part, value, shape.warps, launch,
        frugal=shape.frugal, tiles=rows * slots // threads, segments=shape.segments,
    )  # fmt: skip
    if not most:
        return 0.0, f"{shape.warps} warps have no registers for words with {launch} columns"
    own = own_bytes(fixed.columns, launch, threads * shape.segments, value)
    layer = (8 if value == "fp32" else 4) * threads
    room = max((device.shared_bytes - own) // layer, 0)
    registers = min(words, most)
    shared = words - registers
    if own > device.shared_bytes:
        have = f"{device.shared_bytes:,} of shared memory"
        return 0.0, f"the states of {fixed.columns} units take {own:,} bytes, of {have}"
    if shared > room:
        return (registers + room) / words, (
            f"{shape.warps} warps need {words} non-zeros per thread, of which {registers} fit "
            f"registers and {room} shared memory"
        )
    gates = 1 if fixed.part == "backward" else cell_of(fixed.cell).gates
    return Plan(
        fixed.cell,
        fixed.part,
        device,
        fixed.hidden,
        fixed.batch,
        value,
        fixed.programs,
        rows,
        slots,
        replace(shape, shared_words=shared),
        depth,
        own + layer * shared,
        _parts_us(fixed, shape, words, shared, gates * (rows * slots // threads)),
        fixed.dense_us,
    )


def _would_fit(nonzeros: NDArray[np.integer], columns: int, share: float) -> str:
    """What would fit in place of a matrix, if a share of its non-zeros does."""
    density = share * int(nonzeros.sum()) / (nonzeros.size * columns)
    units = int(nonzeros.shape[1] * share**0.5)
    return f"; a density of about {density:.1%} would fit, or about {units} units at this one"


def _parts_us(fixed: _Fixed, shape: Shape, words: int, shared: int, tiles: int) -> dict[str, float]:
    """``tiles``: sums of a thread's rows that it reads for a pair of batch columns."""
    value, device, warps = fixed.value, fixed.device, shape.warps
    slices = slices_of(fixed.batch, shape.columns)
    each = element_bytes(value, slices[0])
    passes = -(-slices[0] // (COLUMNS[value] * each // 8))
    gathers = warps * words * passes
    issue = gathers * _INSTRUCTIONS[each] / _ISSUE
    banks = gathers * _WAVEFRONTS[each] + warps * shared * (2 if value == "fp32" else 1)
    sums = warps * _SUM_INSTRUCTIONS * tiles * -(-slices[0] // 2) / _ISSUE
    volume = fixed.columns * passes * 2 * each  # each payload has its epoch
    pieces = passes * len(chunks_of(fixed.columns, warps * WARP, frugal=shape.frugal)) - 1
    pieces += shape.frugal  # the inputs are asked for last
    clocks = {
        "gather": max(issue, banks),
        "fixed": float(_FIXED_CLOCKS[warps] * passes) + sums,
        "exchange": _EXCHANGE_CLOCKS + max(_PIECE_CLOCKS * pieces, volume / _L2_CLOCK_BYTES),
    }
    return {name: len(slices) * c / device.clocks_per_us for name, c in clocks.items()}


def _dense_us(nbytes: int, device: Device) -> float:
    rate = device.l2_bytes_per_us if nbytes <= device.l2_bytes else device.memory_bytes_per_us
    return _DENSE_STEP_US + nbytes / rate
