"""Packed patterns that are kept between calls, by what kernels of them have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.fast_part import FastPart
from graphpar.codegen.sparse_rnn.owners import Later, Owner
from graphpar.codegen.sparse_rnn.spec import PartName
from graphpar.errors import GraphparError, KernelError, UnsupportedError

_FIRST_WAIT, _LONGEST_WAIT = 16, 4096  # calls before packing is tried again


@dataclass(frozen=True, slots=True)
class Kind:
    """What kernels of one pattern have in common; ``columns``: of the batch, rounded up."""

    part: PartName
    cell: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    reverse: bool
    columns: int


@dataclass(slots=True, eq=False)
class Entry:
    """A packed pattern; ``owner``: the weight that it served last. ``kept``: which came twice."""

    part: FastPart
    owner: Owner
    used: int = 0
    kept: bool = False
    following: Entry | None = None
    pending: Later | None = None

    def ask_late(self, grown: Tensor) -> None:
        """Of a weight that is trusted to fit: the answer is looked at in the next call."""
        self.pending = Later(grown)

    def raise_late(self) -> None:
        pending = self.pending
        if pending is not None and pending.ready() and pending.value():
            self.pending, self.owner = None, Owner.none()
            raise KernelError(
                f"a recurrent weight of {self.part.cell.name} got non-zeros outside of its pattern "
                "past its version counter (by .data, or in a CUDA graph): results of its last "
                "call were NaN; write weights under torch.no_grad() instead"
            )


@dataclass(slots=True, eq=False)
class Kept:
    """Of one kind: the entries, and how long to wait before packing again."""

    entries: list[Entry] = field(default_factory=list)
    last: Entry | None = None
    packs: int = 0
    wait: int = 0
    patience: int = _FIRST_WAIT
    missed: bool = False
    fault: GraphparError | None = None

    def candidates(self, weight: Tensor) -> list[Entry]:
        """Those whose weight this is first, then what came after the last one last time, or, after
        the last of all, the first."""
        own = [e for e in self.entries if e.owner.has(weight)]
        guess = None if self.last is None else self.last.following or self.entries[0]
        rest = [e for e in reversed(self.entries) if e not in own and e is not guess]
        return [*own, *([guess] if guess is not None and guess not in own else []), *rest]

    def accept(self, entry: Entry, weight: Tensor, tick: int) -> None:
        entry.kept |= entry.owner.has(weight)
        entry.owner, entry.used, self.missed = Owner.of(weight), tick, False
        if self.last is not None:
            self.last.following = entry
        self.last = entry

    @property
    def forgotten(self) -> bool:
        """Whether there is nothing to know of this kind."""
        return not self.entries and self.patience == _FIRST_WAIT

    def refuse(self, fault: GraphparError | None) -> None:
        """After packing that failed, or came too often. What a machine does not support, it does
        not with any pattern."""
        if isinstance(fault, UnsupportedError):
            for entry in [e for e in self.entries if not e.part.captured]:
                self.drop(entry)
        self.fault, self.wait = fault, self.patience
        self.patience = min(2 * self.patience, _LONGEST_WAIT)

    def drop(self, entry: Entry) -> None:
        self.entries.remove(entry)
        for other in self.entries:
            if other.following is entry:
                other.following = None
        if self.last is entry:
            self.last = None
