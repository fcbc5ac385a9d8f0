"""What one fast kernel is for: all that its text depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphpar.codegen.sparse_rnn.devices import WARP
from graphpar.codegen.sparse_rnn.limits import (
    COLUMNS,
    LINE,
    MAX_BATCH,
    SLOTS_PER_ROW,
    Value,
    chunks_of,
    element_bytes,
    slices_of,
    states_length,
)
from graphpar.codegen.sparse_rnn.plan import Plan
from graphpar.codegen.sparse_rnn.spec import Part, power_of_two
from graphpar.errors import CapacityError

WHOLE_WORD_COLUMNS = 4096
"""Up to so many columns a word is read as a float whole: its column changes the value by at most
a sixteenth of the last bit of bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSpec(Part):
    """A kernel of one layer and direction.

    Attributes:
        programs, warps: blocks, and warps of each; a thread holds ``segments`` slots.
        frugal: with registers, for more words in them: few states are received at a time, and what
            the cell reads of its inputs waits for the product.
        segments: slots that a thread works one after another, a power of two.
        register_words, shared_words: non-zeros of a thread in registers and in shared memory.
        rows: units per block, slots: slots per row, powers of two.
        value: type of the weights and of what blocks exchange. sync: "lamport", words that carry
            their epoch, or "counter", a barrier of all blocks.
        reverse: from the last step to the first. ``save``: store what backward needs.
        inline: read and write shared memory by inline PTX: for a Gluon that does not gather.
    """

    programs: int
    warps: int
    register_words: int
    rows: int
    slots: int
    shared_words: int = 0
    segments: int = 1
    frugal: bool = False
    value: Value = "bf16"
    sync: Literal["lamport", "counter"] = "lamport"
    reverse: bool = False
    save: bool = False
    inline: bool = False

    def __post_init__(self) -> None:
        assert self.rows == power_of_two(self.rows)
        assert self.slots == power_of_two(self.slots)
        assert self.segments == power_of_two(self.segments)
        assert self.nonzeros % self.segments == 0
        if not 1 <= self.batch <= MAX_BATCH:
            raise CapacityError(f"a batch of {self.batch}: one launch takes 1 to {MAX_BATCH}")
        if self.slots > SLOTS_PER_ROW:
            raise CapacityError(f"{self.slots} slots in a row: the kernel adds {SLOTS_PER_ROW}")

    @classmethod
    def of(cls, plan: Plan, *, reverse: bool = False, save: bool = False) -> FastSpec:
        """The kernel that a plan asks for; of a large batch, its first slice."""
        return cls(
            part=plan.part,
            cell_name=plan.cell,
            hidden=plan.hidden,
            batch=slices_of(plan.batch, plan.shape.columns)[0],
            value=plan.value,
            programs=plan.programs,
            warps=plan.warps,
            register_words=plan.register_words,
            shared_words=plan.shared_words,
            segments=plan.shape.segments,
            frugal=plan.shape.frugal,
            rows=plan.rows,
            slots=plan.slots,
            reverse=reverse,
            save=save,
        )

    @property
    def nonzeros(self) -> int:
        """Of a thread."""
        return self.register_words + self.shared_words

    @property
    def depth(self) -> int:
        """Non-zeros of a slot, KT."""
        return self.nonzeros // self.segments

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def element_bytes(self) -> int:
        """Of a state's batch columns that are gathered at once."""
        return element_bytes(self.value, self.batch)

    @property
    def payloads(self) -> int:
        """Of 32 bits, in an element."""
        return self.element_bytes // 4

    @property
    def columns(self) -> int:
        """Batch columns that a gather serves."""
        return COLUMNS[self.value] * self.element_bytes // 8

    @property
    def passes(self) -> int:
        """Gathers per non-zero."""
        return -(-self.batch // self.columns)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the pieces, powers of two, in which a block receives the states."""
        return chunks_of(self.exchanged, self.threads, frugal=self.frugal)

    @property
    def states(self) -> int:
        """Elements of a pass that lie in shared memory."""
        return states_length(self.exchanged)

    @property
    def lane_slots(self) -> int:
        """Neighbouring slots of a row whose sums one lane adds: as few as give each thread one
        unit at most."""
        return min(self.slots, max(1, self.rows * self.slots // self.threads))

    @property
    def states_lines(self) -> int:
        """Lines of the states of a pass."""
        return self.states * self.element_bytes // (8 * LINE)

    @property
    def room_lines(self) -> int:
        """Lines of shared memory for the states, if of one pass, and then the words."""
        return (self.passes == 1) * self.states_lines + self.words_lines

    @property
    def words_lines(self) -> int:
        """Lines of the words in shared memory."""
        words = self.shared_words * self.threads * (2 if self.value == "fp32" else 1)
        return words // (2 * LINE)

    @property
    def words(self) -> int:
        """64-bit words of the exchange, both buffers: [2, passes, N], and one for each payload if
        half of each is its epoch."""
        return 2 * self.passes * self.exchanged * (self.payloads if self.sync == "lamport" else 1)
