"""How long a kernel takes: the cost model as an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graphpar.cost.collectives import collective_us, sent_bytes
from graphpar.cost.hardware import Hardware, Link
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

    def beside_us(self, kernel: Kernel, collective: Kernel) -> float:
        """Microseconds that a kernel would take if a collective ran beside all of it."""
        ...


def total_us(times: Times, kernels: Iterable[Kernel]) -> float:
    return sum(map(times.kernel_us, kernels))


def elapsed_us(times: Times, kernels: Iterable[Kernel]) -> float:
    """The same with collectives beside kernels: these queue on one stream, collectives on another,
    and what comes after the kernels that a collective overlaps waits for it. A collective runs at
    its own speed, a kernel beside it is slowed down for as long as it runs."""
    compute_us = link_us = 0.0
    running: list[_Running] = []
    due: list[tuple[int, float]] = []
    for place, kernel in enumerate(kernels):
        for ready in [each for each in due if each[0] <= place]:
            compute_us = max(compute_us, ready[1])
            due.remove(ready)
        if kernel.collective:
            link_us = max(compute_us, link_us) + times.kernel_us(kernel)
            running.append(_Running(kernel, link_us))
            due.append((place + 1 + kernel.overlaps, link_us))
        else:
            running = [each for each in running if each.end_us > compute_us]
            compute_us = _end_us(times, kernel, compute_us, running)
    return max([compute_us, *(end for _, end in due)])


@dataclass(frozen=True, slots=True)
class _Running:
    collective: Kernel
    end_us: float


def _end_us(times: Times, kernel: Kernel, start_us: float, running: Sequence[_Running]) -> float:
    """When a kernel ends that starts while the first of these collectives runs; each of the others
    starts as the one before ends."""
    now_us, left = start_us, 1.0
    for each in running:
        beside_us = times.beside_us(kernel, each.collective)
        if now_us + left * beside_us <= each.end_us:
            return now_us + left * beside_us
        left -= (each.end_us - now_us) / beside_us
        now_us = each.end_us
    return now_us + left * times.kernel_us(kernel)


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
        if kernel.collective:
            size = kernel.whole_bytes
            return collective_us(kernel.collective, size, kernel.ranks, self._link(kernel))
        return self._slowed_us(kernel, occupied=0.0, taken=0.0)

    def beside_us(self, kernel: Kernel, collective: Kernel) -> float:
        """With the multiprocessors and the memory bandwidth that the collective leaves."""
        us, link = self.kernel_us(collective), self._link(collective)
        if not us:
            return self.kernel_us(kernel)
        sent = sent_bytes(collective.collective, collective.whole_bytes, collective.ranks)
        return self._slowed_us(kernel, link.occupies, link.memory_passes * sent / us)

    def _link(self, collective: Kernel) -> Link:
        near = collective.ranks * collective.stride <= self.node_ranks
        return self.hardware.nvlink if near else self.hardware.network

    def _slowed_us(self, kernel: Kernel, occupied: float, taken: float) -> float:
        """Beside what occupies a share of the device and takes bytes a microsecond of its memory's
        bandwidth."""
        device = self.hardware
        rate = device.flops_rate(kernel.dtype) * device.tile_share(kernel.tiles, occupied)
        arithmetic = _over(kernel.flops, rate)
        traffic = _over(kernel.bytes_moved, device.memory_bytes_per_us - taken)
        random = kernel.draws / device.draws_per_us + kernel.masks / device.masks_per_us
        random = _over(random, 1 - occupied)
        if device.draws_hide:
            return max(arithmetic, traffic, device.launch_us, random)
        return max(arithmetic, traffic, device.launch_us) + random


def _over(amount: float, rate: float) -> float:
    if not amount:
        return 0.0
    return amount / rate if rate > 0 else math.inf


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

    def beside_us(self, kernel: Kernel, collective: Kernel) -> float:
        return self.kernel_us(kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTimes:
    """Times by the name of an op (``"aten.mm"``) or collective; for tests and measured tables."""

    table_us: Mapping[str, float]
    default_us: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: {"table_us": "given"})

    def kernel_us(self, kernel: Kernel) -> float:
        return self.table_us.get(kernel.collective or kernel.op, self.default_us)

    def beside_us(self, kernel: Kernel, collective: Kernel) -> float:
        return self.kernel_us(kernel)
