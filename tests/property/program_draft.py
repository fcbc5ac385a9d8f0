"""Random choices, and a network under construction."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.property.pick import Pick
from tests.property.program_nets import Body, Net, Step, as_list

MOST_ELEMENTS = 4096


def rarely(pick: Pick, one_in: int) -> bool:
    return pick.number(0, one_in - 1) == one_in - 1


def a_size(pick: Pick, tp: int) -> int:
    """Mostly one that tp divides."""
    if pick.number(0, 3):
        return tp * pick.number(1, max(16 // tp, 2))
    return pick.number(1, 9)


class Draft:
    """A network under construction."""

    def __init__(self, pick: Pick, tp: int, inputs: Sequence[Tensor], depth: int = 0) -> None:
        self.pick, self.tp, self.depth = pick, tp, depth
        self.net = Net(Body((), (), rarely(pick, 4)), [])
        self.net.values = [value.detach() for value in inputs]

    @property
    def values(self) -> list[Tensor]:
        return self.net.values

    def floats(self, low: int = 1, high: int = 5) -> list[int]:
        return [
            i for i, x in enumerate(self.values) if x.is_floating_point() and low <= x.dim() <= high
        ]

    def value(self, low: int = 1, high: int = 5) -> int | None:
        """A floating value, the newest half of the time."""
        found = self.floats(low, high)
        if not found:
            return None
        return found[-1] if self.pick.flag() else self.pick.one(found[::-1])

    def size(self) -> int:
        return a_size(self.pick, self.tp)

    def rarely(self, one_in: int) -> bool:
        return rarely(self.pick, one_in)

    def try_add(self, step: Step | None) -> bool:
        """Add a step if it runs, and its results are fit for the test."""
        if step is None:
            return False
        before = self.net.values
        self.net.values = list(before)
        count, body = len(self.net.parts), self.net.body
        try:
            results = self.net.add(step)
        except (RuntimeError, IndexError, ValueError, TypeError):
            results = []
        fits = bool(results) and all(fit(x) for x in results) and self.certain(step)
        if not fits and len(self.net.parts) > count:
            self.net.parts.pop()
            self.net.body = body
            if step.part != "again" and not body.named:
                del self.net.steps[-1]
        if not fits:
            self.net.values = before
        return fits

    def certain(self, step: Step) -> bool:
        """Whether no result of the last step is a matter of rounding, as is which of two equal rows
        is the greater, or a basis of columns that depend on each other."""
        inputs = [self.values[i] for i in step.inputs]
        if not any(map(is_float, inputs)):
            return True
        noise = torch.Generator().manual_seed(0)
        near = [
            x + 1e-9 * torch.randn(x.shape, dtype=x.dtype, generator=noise) if is_float(x) else x
            for x in inputs
        ]
        found = []
        for values in (inputs, near):
            with torch.no_grad(), torch.random.fork_rng():
                found.append(as_list(copy.deepcopy(self.net.parts[-1])(*values)))
        return all(
            torch.allclose(x, y, rtol=1e-4, atol=1e-4) if is_float(x) else torch.equal(x, y)
            for x, y in zip(*found, strict=True)
        )


def is_float(x: Tensor) -> bool:
    return x.is_floating_point()


def fit(x: Tensor) -> bool:
    if not 0 < x.numel() <= MOST_ELEMENTS or x.dim() > 5:
        return False
    return not x.is_floating_point() or bool(x.isfinite().all() and x.abs().max() < 1e3)
