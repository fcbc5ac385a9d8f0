"""The order of work on each device of a pipeline: 1F1B and its interleaved form.

Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: a device runs some forwards first, then one
forward and one backward in turn, then the backwards that are left. Interleaved, a device holds
several chunks of layers: chunk ``c`` of ``pp * interleave`` is on device ``c % pp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpar.errors import InputError


@dataclass(frozen=True, slots=True)
class Task:
    """Forward or backward of one microbatch through one chunk."""

    backward: bool
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """``pp`` stages, ``interleave`` chunks on each, ``microbatches`` in a step.

    Raises:
        InputError: the numbers make no schedule; the message names those that would.
    """

    pp: int = 1
    interleave: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "interleave", "microbatches"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.interleave > 1 and self.pp == 1:
            raise InputError(f"interleave={self.interleave} needs pp of at least 2")
        if self.interleave > 1 and self.microbatches % self.pp:
            below = self.microbatches // self.pp * self.pp
            legal = [n for n in (below, below + self.pp) if n]
            raise InputError(
                f"with interleave={self.interleave} microbatches must be a multiple of "
                f"pp={self.pp}, not {self.microbatches}; legal: {', '.join(map(str, legal))}, ..."
            )

    @property
    def chunks(self) -> int:
        return self.pp * self.interleave

    def tasks(self, device: int) -> list[Task]:
        """What one device runs, in order."""
        work = self.interleave * self.microbatches
        first = self._warmup(device)
        order = [self._task(device, k, backward=False) for k in range(first)]
        for k in range(work - first):
            order.append(self._task(device, first + k, backward=False))
            order.append(self._task(device, k, backward=True))
        order += [self._task(device, k, backward=True) for k in range(work - first, work)]
        return order

    def _warmup(self, device: int) -> int:
        """How many forwards run before the first that a backward follows."""
        if self.interleave == 1:
            return min(self.microbatches, self.pp - device - 1)
        ahead = 2 * (self.pp - device - 1) + (self.interleave - 1) * self.pp
        return min(self.interleave * self.microbatches, ahead)

    def _task(self, device: int, k: int, *, backward: bool) -> Task:
        """The ``k``-th forward or backward of a device: ``pp`` microbatches through each of its
        chunks in turn."""
        lap, within = divmod(k, self.chunks)
        turn, place = divmod(within, self.pp)
        if backward:
            turn = self.interleave - 1 - turn
        microbatch = lap * self.pp + place if self.interleave > 1 else k
        return Task(backward, turn * self.pp + device, microbatch)
