"""Hardware as data, FLOPs and bytes of kernels, collectives, and the cost model as an argument."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from graphpar import ops
from graphpar.cost import (
    HARDWARE,
    ConstantTimes,
    Kernel,
    Roofline,
    TableTimes,
    Times,
    calibrate_cpu,
    dry_run,
    find_hardware,
    total_us,
)
from graphpar.cost.collectives import collective_us
from graphpar.cost.hardware import Hardware
from graphpar.cost.kernels import KernelRecorder
from graphpar.errors import InputError
from graphpar.interpret import model_state, run
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.trace import flatten, trace
from tests import zoo

MB = 10**6


@pytest.mark.parametrize("name", HARDWARE)
def test_every_figure_has_a_source(name: str) -> None:
    figures = {f.name for f in fields(Hardware)} - {"name", "sources"}
    assert set(find_hardware(name).sources) == figures


def test_unknown_hardware_lists_the_known() -> None:
    with pytest.raises(InputError, match="no hardware is named 'b200'; known: a100-40gb"):
        find_hardware("b200")


def test_this_cpu_is_measured() -> None:
    cpu = calibrate_cpu(seconds=0.1)
    assert set(cpu.sources) == {f.name for f in fields(Hardware)} - {"name", "sources"}
    # From a slow core to a big machine, in FLOP/us, bytes/us and us.
    assert 1e2 < cpu.flops_rate(torch.float32) < 1e8
    assert 1e2 < cpu.memory_bytes_per_us < 1e7
    assert 0.01 < cpu.launch_us < 1e3
    assert 0.1 < cpu.draws_per_us < 1e5
    assert 0.1 < cpu.masks_per_us < 1e5


def test_large_collectives_take_the_bandwidth() -> None:
    link = find_hardware("h100").nvlink
    nbytes = 10_000 * MB
    gather = collective_us("all_gather", nbytes, 8, link)
    assert gather == pytest.approx(nbytes * 7 / 8 / link.bytes_per_us, rel=0.01)
    assert collective_us("reduce_scatter", nbytes, 8, link) == gather
    assert collective_us("all_reduce", nbytes, 8, link) == pytest.approx(2 * gather, rel=0.01)
    assert collective_us("all_to_all", nbytes, 8, link) == pytest.approx(gather / 8, rel=0.01)


def test_small_collectives_take_the_latency() -> None:
    link = find_hardware("a100-80gb").nvlink
    assert collective_us("all_gather", 8, 8, link) == pytest.approx(6.6 + 7 * 0.6, rel=1e-3)
    assert collective_us("all_reduce", 8, 8, link) == pytest.approx(6.6 + 14 * 0.6, rel=1e-3)
    assert collective_us("all_reduce", 8, 1, link) == 0


def test_more_ranks_than_a_node_has_go_over_the_network() -> None:
    times = Roofline(hardware=find_hardware("h100"))
    near, far = (
        Kernel(op="c", collective="all_gather", ranks=ranks, whole_bytes=100 * MB)
        for ranks in (8, 16)
    )
    assert times.kernel_us(far) > 5 * times.kernel_us(near)


def test_a_roofline_is_arithmetic_or_traffic_or_launch() -> None:
    device = find_hardware("a100-80gb")
    times = Roofline(hardware=device)
    product = Kernel(op="mm", dtype=torch.bfloat16, flops=10**12, bytes_moved=1)
    assert times.kernel_us(product) == pytest.approx(10**12 / (271.2e6))
    copied = Kernel(op="copy", bytes_moved=2_039_000_000)
    assert times.kernel_us(copied) == pytest.approx(1000)
    assert times.kernel_us(Kernel(op="add")) == device.launch_us


def test_random_numbers_have_a_price() -> None:
    """By the op alone: the mask of a seeded dropout is made within it, on a GPU by one kernel."""
    gpu = find_hardware("h100")
    device = replace(gpu, draws_per_us=100.0, masks_per_us=50.0, draws_hide=False)
    x = torch.empty(4000, 1000, device="meta")
    seed = torch.zeros(2, dtype=torch.int64)
    with KernelRecorder() as recorder:
        torch.bernoulli(x)
        ops.seeded_dropout(x, seed, 0.1, 0)
        x + 1
    draw, mask, plain = map(Roofline(hardware=device).kernel_us, recorder.kernels)
    assert draw - plain == pytest.approx(x.numel() / 100)
    assert mask - plain == pytest.approx(x.numel() / 50)
    hidden = Roofline(hardware=replace(device, draws_hide=True))
    assert hidden.kernel_us(recorder.kernels[0]) == pytest.approx(x.numel() / 100)
    fused = Roofline(hardware=gpu).kernel_us(recorder.kernels[1])
    assert fused == pytest.approx(2 * x.nbytes / gpu.memory_bytes_per_us, rel=1e-3)


def test_what_makes_a_tensor_like_another_one_does_not_read_it() -> None:
    x = torch.empty(1000, 1000, device="meta")
    seed = torch.zeros(2, dtype=torch.int64)
    with KernelRecorder() as recorder:
        torch.rand_like(x)
        torch.ops.graphpar.dropout_bits(x, seed, 0.1, 0, 0)
    assert [kernel.bytes_moved for kernel in recorder.kernels] == [x.nbytes, x.numel()]


def test_times_are_an_argument() -> None:
    kernels = [Kernel(op="aten.mm"), Kernel(op="aten.add"), Kernel(op="x", collective="all_gather")]
    models: list[Times] = [
        ConstantTimes(each_us=2, collective_us=5),
        TableTimes(table_us={"aten.mm": 7, "all_gather": 1}, default_us=1),
    ]
    assert [total_us(times, kernels) for times in models] == [9, 9]
    assert all(times.sources for times in models)


def recorded(x: torch.Tensor, *ops: str) -> list[Kernel]:
    with KernelRecorder() as recorder:
        exec("; ".join(ops), {"x": x, "torch": torch})
    found: list[Kernel] = recorder.kernels
    return found


def test_views_move_nothing_and_kernels_what_they_read_and_write() -> None:
    x = torch.ones(4, 6)
    assert recorded(x, "x.view(24)", "x.t()[1:]", "x.expand(3, 4, 6)", "torch.empty(9)") == []
    (added,) = recorded(x, "x + x[0].expand(4, 6)")  # reads 24 and 6 numbers, writes 24
    assert (added.op, added.bytes_moved, added.flops) == ("aten.add", 4 * (24 + 6 + 24), 0)
    (product,) = recorded(x, "x @ x.t()")
    assert (product.flops, product.bytes_moved) == (2 * 4 * 6 * 4, 4 * (24 + 24 + 16))
    (written,) = recorded(x, "x.mul_(2)")
    assert written.bytes_moved == 2 * 96
    (rows,) = recorded(torch.ones(1000, 8), "torch.embedding(x, torch.tensor([1, 2]))")
    assert rows.bytes_moved == 2 * 64 + 16


@pytest.mark.parametrize("name", ["nanogpt", "vit"])
def test_flops_are_those_of_the_flop_counter(name: str) -> None:
    model, kwargs = zoo.build(name, dropout=0.1)
    program = trace(model, (), kwargs)
    outlined = run_pipeline(program, default_pipeline(tp=1))["outline"]
    with FlopCounterMode(display=False) as counter:
        run(outlined, model_state(model), flatten((), kwargs)[0])
    flops = sum(k.flops for k in dry_run(outlined).kernels if "attention" not in k.op)
    assert flops == counter.get_total_flops() > 0


def test_attention_on_the_cpu_counts_both_products() -> None:
    model, kwargs = zoo.build("llama", dropout=0.0, layers=1)
    program = trace(model, (), kwargs)
    flops = [k.flops for k in dry_run(program).kernels if "attention" in k.op]
    assert flops == [2 * 2 * zoo.BATCH * zoo.SEQ * zoo.SEQ * zoo.WIDTH]


@pytest.mark.parametrize("sp", [False, True])
def test_collectives_of_a_layer_carry_the_residual_stream(sp: bool) -> None:
    """Korthikanti et al. 2022, section 4.2.2: the volume of two all-reduces, or of two all-gathers
    and two reduce-scatters."""
    model, kwargs = zoo.build("gpt2", layers=1)
    stages = run_pipeline(trace(model, (), kwargs), default_pipeline(tp=4, sp=sp))
    (layer,) = (s.block for s in dry_run(stages["seed-dropout"]).steps if s.block is not None)
    found = [(k.collective, k.ranks, k.whole_bytes) for k in layer.kernels if k.collective]
    stream = 4 * zoo.BATCH * zoo.SEQ * zoo.WIDTH
    kinds = ["all_gather", "reduce_scatter"] * 2 if sp else ["all_reduce"] * 2
    assert found == [(kind, 4, stream) for kind in kinds]
