"""The time of kernels beside collectives, on random timelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpar.cost import HARDWARE, Hardware, Kernel, Roofline, Times, elapsed_us, total_us

HOST = HARDWARE["h100"]


def beside(channels: int, memory_passes: float, device: Hardware = HOST) -> Roofline:
    """A device whose collectives take so many multiprocessors, and so much of its memory."""
    occupies = channels / device.multiprocessors
    link = replace(device.nvlink, occupies=occupies, memory_passes=memory_passes)
    return Roofline(hardware=replace(device, nvlink=link, draws_per_us=1e4))


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    kind = draw(st.sampled_from(["product", "attention", "copy", "draw", "collective"]))
    size = draw(st.integers(1, 400))
    if kind == "collective":
        name = draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]))
        overlaps, ranks = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 8]))
        nbytes = size * 10**6
        return Kernel(op="c", collective=name, ranks=ranks, whole_bytes=nbytes, overlaps=overlaps)
    of: dict[str, Any] = {
        "product": {"flops": size * 10**9, "tiles": size, "bytes_moved": size * 10**4},
        "attention": {"flops": size * 10**9},
        "copy": {"bytes_moved": size * 10**6},
        "draw": {"draws": size * 10**4},
    }
    return Kernel(op=kind, dtype=torch.bfloat16, **of[kind])


timelines = st.lists(kernels(), max_size=8)


def side_by_side(times: Times, timeline: list[Kernel]) -> float:
    """All at full speed."""
    compute = link = 0.0
    ends: list[tuple[int, float]] = []
    for place, kernel in enumerate(timeline):
        compute = max([compute, *(end for until, end in ends if until <= place)])
        if kernel.collective:
            link = max(compute, link) + times.kernel_us(kernel)
            ends.append((place + 1 + kernel.overlaps, link))
        else:
            compute += times.kernel_us(kernel)
    return max([compute, *(end for _, end in ends)])


@given(timelines, st.integers(0, 132), st.sampled_from([0.0, 1.0, 3.0, 30.0]))
def test_between_side_by_side_and_in_turn(
    timeline: list[Kernel], channels: int, memory_passes: float
) -> None:
    times = beside(channels, memory_passes)
    us = elapsed_us(times, timeline)
    least, most = side_by_side(times, timeline), total_us(times, timeline)
    assert least * (1 - 1e-9) <= us <= most * (1 + 1e-9)
    if not channels and not memory_passes:
        assert us == pytest.approx(least)


@given(timelines, st.integers(0, 131), st.integers(1, 40), st.sampled_from([0.0, 1.0, 3.0]))
def test_what_takes_more_never_ends_sooner(
    timeline: list[Kernel], channels: int, more: int, memory_passes: float
) -> None:
    us = elapsed_us(beside(channels, memory_passes), timeline)
    most = min(channels + more, 132)
    assert us <= elapsed_us(beside(most, memory_passes), timeline) * (1 + 1e-9)
    assert us <= elapsed_us(beside(channels, memory_passes + 1), timeline) * (1 + 1e-9)


def test_a_product_of_one_wave_takes_two_beside_a_gather() -> None:
    """132 tiles on an H100 beside a gather on 24 of its multiprocessors: 80 to 47% of the rate
    (measured: NVIDIA's developer forum, topic 337991)."""
    times = Roofline(hardware=HOST)
    product = Kernel(op="mm", dtype=torch.bfloat16, flops=10**11, tiles=132)
    gather = Kernel(op="c", collective="all_gather", ranks=8, whole_bytes=10**9, overlaps=1)
    assert times.beside_us(product, gather) == pytest.approx(2 * times.kernel_us(product))


def test_the_rest_of_a_kernel_runs_at_full_speed() -> None:
    """A copy beside a gather that takes half of the memory's bandwidth for its time."""
    gather = Kernel(op="c", collective="all_gather", ranks=8, whole_bytes=10**9, overlaps=1)
    us = Roofline(hardware=HOST).kernel_us(gather)
    half = HOST.memory_bytes_per_us / 2 / (10**9 * 7 / 8 / us)
    copy = Kernel(op="copy", bytes_moved=int(2 * us * HOST.memory_bytes_per_us))
    assert elapsed_us(beside(24, half), [gather, copy]) == pytest.approx(us + 1.5 * us)


def test_what_a_collective_leaves_no_room_for_waits() -> None:
    """A CPU of one core, whose messages take all of its memory's bandwidth."""
    times = beside(132, 1e9)
    gather = Kernel(op="c", collective="all_gather", ranks=8, whole_bytes=10**9, overlaps=1)
    for kernel in (Kernel(op="mm", flops=10**9), Kernel(op="copy", bytes_moved=10**9)):
        us = [times.kernel_us(each) for each in (gather, kernel)]
        assert elapsed_us(times, [gather, kernel]) == pytest.approx(sum(us))
