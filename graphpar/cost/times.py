"""How long a kernel takes: the cost model as an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graphpar.cost.collectives import collective_us
from graphpar.cost.hardware import Hardware
from graphpar.cost.kernels import Kernel


class Times(Protocol):
    """A cost model of kernels."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each of its figures comes from."""
        ...

    def kernel_us(self, kernel: Kernel) -> float:
        """Microseconds that one kernel or collective takes."""
        ...


def total_us(times: Times, kernels: Iterable[Kernel]) -> float:
    return sum(map(times.kernel_us, kernels))


def elapsed_us(times: Times, kernels: Iterable[Kernel]) -> float:
    """The same with collectives beside kernels: these queue on one stream, collectives on another,
    and what comes after the kernels that a collective overlaps waits for it."""
    compute_us = link_us = 0.0
    due: list[tuple[int, float]] = []
    for place, kernel in enumerate(kernels):
        for ready in [each for each in due if each[0] <= place]:
            compute_us = max(compute_us, ready[1])
            due.remove(ready)
        if kernel.collective:
            link_us = max(compute_us, link_us) + times.kernel_us(kernel)
            due.append((place + 1 + kernel.overlaps, link_us))
        else:
            compute_us += times.kernel_us(kernel)
    return max([compute_us, *(end for _, end in due)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The greater of arithmetic and memory traffic, at least a launch (Williams et al. 2009), and
    what random numbers take beside.

    A collective runs over NVLink where its ranks are within ``node_ranks``, else over the network.
    """

    hardware: Hardware
    node_ranks: int = 8

    @property
    def sources(self) -> Mapping[str, str]:
        return self.hardware.sources

    def kernel_us(self, kernel: Kernel) -> float:
        device = self.hardware
        if kernel.collective:
            near = kernel.ranks * kernel.stride <= self.node_ranks
            link = device.nvlink if near else device.network
            return collective_us(kernel.collective, kernel.whole_bytes, kernel.ranks, link)
        rate = device.flops_rate(kernel.dtype) * device.tile_share(kernel.tiles)
        arithmetic = kernel.flops / rate
        traffic = kernel.bytes_moved / device.memory_bytes_per_us
        random = kernel.draws / device.draws_per_us + kernel.masks / device.masks_per_us
        return max(arithmetic, traffic, device.launch_us) + random


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTimes:
    """Every kernel takes as long as every other; for tests."""

    each_us: float = 1.0
    collective_us: float = 1.0

    @property
    def sources(self) -> Mapping[str, str]:
        return {"each_us": "given", "collective_us": "given"}

    def kernel_us(self, kernel: Kernel) -> float:
        return self.collective_us if kernel.collective else self.each_us


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTimes:
    """Times by the name of an op (``"aten.mm"``) or collective; for tests and measured tables."""

    table_us: Mapping[str, float]
    default_us: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: {"table_us": "given"})

    def kernel_us(self, kernel: Kernel) -> float:
        return self.table_us.get(kernel.collective or kernel.op, self.default_us)
