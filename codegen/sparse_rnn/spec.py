"""What one generated kernel is for: all that its text depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from graphpar.codegen.sparse_rnn.cells import Cell, cell_of
from graphpar.errors import CapacityError

PartName = Literal["forward", "backward"]
MAX_ELEMENTS = 1 << 20
"""Of one Triton tensor."""


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A kernel's cell and direction: ``part`` is "forward" or "backward"."""

    cell_name: str
    part: PartName
    hidden: int
    batch: int

    @property
    def facts(self) -> str:
        """All fields, for the head of the generated file."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @property
    def cell(self) -> Cell:
        return cell_of(self.cell_name)

    @property
    def gates(self) -> int:
        """Rows that a unit has in the packed matrix: in backward, which is transposed, one."""
        return self.cell.gates if self.part == "forward" else 1

    @property
    def exchanged(self) -> int:
        """Elements that a batch column exchanges at a step."""
        return self.hidden * (1 if self.part == "forward" else self.cell.gates)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Part):
    """A kernel of one layer and direction.

    Attributes:
        programs: blocks of the launch; all must run at once.
        depth, threads: non-zeros per slot and slots per block, powers of two.
        rows, slots: units per block and slots per row, powers of two.
        state: type of the states (in backward: of the gates' gradients) that blocks exchange;
            "bf16" packs two batch columns into a word.
        sync: "lamport", words that carry their epoch, or "counter", a barrier of all blocks.
        reverse: from the last step to the first. ``save``: store what backward needs.
    """

    programs: int
    depth: int
    threads: int
    rows: int
    slots: int
    state: Literal["fp32", "bf16"] = "fp32"
    sync: Literal["lamport", "counter"] = "lamport"
    reverse: bool = False
    save: bool = True

    def __post_init__(self) -> None:
        for size in (self.depth, self.threads, self.rows, self.slots):
            assert size == power_of_two(size)
        most = max(self.depth * self.threads, power_of_two(self.exchanged))
        if most > MAX_ELEMENTS:
            raise CapacityError(
                f"{most} elements in a tensor of the reference kernel: Triton takes {MAX_ELEMENTS}"
            )

    @property
    def word_columns(self) -> int:
        """Words per element that is exchanged: batch columns, or pairs of them."""
        return self.batch if self.state == "fp32" else -(-self.batch // 2)

    @property
    def words(self) -> int:
        """64-bit words of the exchange, both buffers."""
        return 2 * self.word_columns * self.exchanged
