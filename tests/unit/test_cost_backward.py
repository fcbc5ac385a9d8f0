"""Backward, kernel by kernel, and the time of collectives beside other kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphpar import memory
from graphpar.cost import HARDWARE, ConstantTimes, Kernel, Roofline, TableTimes, dry_run, elapsed_us
from graphpar.cost.collectives import collective_us
from graphpar.cost.dry_run import planned_group
from graphpar.cost.kernels import KernelRecorder
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, placeholders
from graphpar.runtime import compile_program
from graphpar.trace import trace
from tests import zoo

COLLECTIVES = torch.ops._c10d_functional


def local(name: str, tp: int) -> Program:
    model, kwargs = zoo.build(name)
    stages = run_pipeline(trace(model, (), kwargs), default_pipeline(tp=tp, sp=True))
    return list(stages.values())[-1]


def recorded(program: Program) -> list[Kernel]:
    """The kernels of one backward of the whole program, from a loss."""
    with planned_group(program.ranks) as group, memory._fake():
        root, _ = memory._state(program, program.ranks)
        inputs = [memory._input(n, program.ranks, ()) for n in placeholders(program.graph)]
        constants = {name: memory._constant(x) for name, x in program.constants.items()}
        results = compile_program(replace(program, constants=constants), group)(root, *inputs)
        start = memory._start(results)
        with KernelRecorder() as recorder:
            start.backward(torch.empty_like(start))
    kernels: list[Kernel] = recorder.kernels
    return kernels


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 1), ("nanogpt", 2)])
def test_backward_is_what_autograd_runs(name: str, tp: int) -> None:
    """Every kernel; but a sum may be in place, and a gradient that comes transposed is copied."""
    program = local(name, tp)
    found = list(dry_run(program, trained_inputs=(), backward=True).backward)
    wanted = recorded(program)

    def counted(kernels: list[Kernel]) -> Counter[Kernel]:
        free = ("aten.add", "aten.add_", "aten.clone")
        return Counter(kernel for kernel in kernels if kernel.op not in free)

    assert counted(found) == counted(wanted)
    assert sum(k.op.startswith("aten.add") for k in found) == sum(
        k.op.startswith("aten.add") for k in wanted
    )
    moved = [sum(k.bytes_moved for k in kernels) for kernels in (found, wanted)]
    assert moved[0] == pytest.approx(moved[1], rel=0.05)


def test_without_asking_there_is_no_backward() -> None:
    program = local("nanogpt", 2)
    assert list(dry_run(program).backward) == []


# --- time ---------------------------------------------------------------------------------------

US = TableTimes(table_us={"a": 1.0, "b": 10.0, "gather": 4.0})
A, B = Kernel(op="a"), Kernel(op="b")


def gather(overlaps: int) -> Kernel:
    return Kernel(op="x", collective="gather", overlaps=overlaps)


@pytest.mark.parametrize(
    ("kernels", "us"),
    [
        ([], 0),
        ([A, gather(0), B], 15),  # waited for at once
        ([A, gather(1), B], 11),  # all of it beside b
        ([B, gather(1), A], 14),  # some beside a
        ([gather(1), A, B], 14),
        ([gather(2), gather(1), A, A], 9),  # one after the other; b comes behind
        ([A, gather(5)], 5),  # never waited for: the end waits
        ([gather(2), A, B], 11),
    ],
)
def test_collectives_run_beside_kernels(kernels: list[Kernel], us: float) -> None:
    assert elapsed_us(US, kernels) == us


def test_a_recorder_sees_how_late_a_collective_is_waited_for() -> None:
    with planned_group(2) as group, memory._fake(), KernelRecorder() as recorder:
        x = torch.empty(4)
        late = COLLECTIVES.all_gather_into_tensor(x, 2, group)
        soon = COLLECTIVES.all_gather_into_tensor(x, 2, group)
        COLLECTIVES.wait_tensor(soon)
        x = x.sin().cos()
        COLLECTIVES.wait_tensor(late)
        x.sin()
    assert [kernel.overlaps for kernel in recorder.kernels] == [3, 0, 0, 0, 0]


def test_groups_across_nodes_use_the_network() -> None:
    times = Roofline(hardware=HARDWARE["h100"])
    near = Kernel(op="x", collective="all_reduce", ranks=4, stride=2, whole_bytes=10**8)
    far = replace(near, stride=8)
    device = times.hardware
    assert times.kernel_us(near) == collective_us("all_reduce", 10**8, 4, device.nvlink)
    assert times.kernel_us(far) == collective_us("all_reduce", 10**8, 4, device.network)


def test_a_send_is_its_bytes_over_the_link() -> None:
    link = HARDWARE["h100"].network
    assert collective_us("send", 10**9, 2, link) == pytest.approx(1e9 / link.bytes_per_us, rel=0.01)


def test_the_last_wave_of_tiles_may_be_small() -> None:
    """NVIDIA's guide, section 3.2: 108 multiprocessors, tiles of 256 x 128."""
    a100 = HARDWARE["a100-80gb"]
    assert a100.tile_share(108) == 1
    assert a100.tile_share(109) == pytest.approx(109 / 216)
    assert a100.tile_share(216) == 1
    assert a100.tile_share(10) == 1  # smaller tiles are taken then
    with memory._fake(), KernelRecorder() as recorder:
        rows = [torch.empty(256 * 12, 64, dtype=torch.bfloat16) for _ in range(2)]
        _: Tensor = rows[0] @ rows[1][: 128 * 9].T  # 12 x 9 tiles
        rows[0] @ rows[1][: 128 * 9 + 1].T
    full, more = recorder.kernels
    assert (full.tiles, more.tiles) == (108, 120)
    times = Roofline(hardware=a100)
    compute = replace(full, flops=10**12), replace(more, flops=10**12)
    assert times.kernel_us(compute[1]) == pytest.approx(times.kernel_us(compute[0]) * 216 / 120)
    assert ConstantTimes().kernel_us(full) == 1
