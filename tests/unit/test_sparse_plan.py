"""Plans of persistent kernels: what fits, on which device, and why not."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from graphpar.codegen.sparse_rnn.cells import CELLS, cell_of
from graphpar.codegen.sparse_rnn.compile import Compiled, compile_all, fast_order
from graphpar.codegen.sparse_rnn.devices import DEVICES, device_of
from graphpar.codegen.sparse_rnn.emit import write
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast import Fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import (
    FastLauncher,
    check_device,
    check_resident,
    for_triton,
    triton_version,
)
from graphpar.codegen.sparse_rnn.limits import Value, element_bytes, register_words
from graphpar.codegen.sparse_rnn.pack import pack
from graphpar.codegen.sparse_rnn.plan import Plan, Shape, own_bytes, plan_kernel
from graphpar.codegen.sparse_rnn.static_checks import check, resident_blocks
from graphpar.errors import CapacityError, InputError, KernelError

H200 = device_of("sm_90")


def plan(cell: str, hidden: int, density: float, *, batch: int = 4, arch: str = "sm_90") -> Plan:
    generator = np.random.default_rng(0)
    rows = generator.binomial(hidden, density, (cell_of(cell).gates, hidden))
    return plan_kernel(cell, rows, hidden, batch=batch, device=device_of(arch))


def test_a_plan_is_what_packing_needs() -> None:
    weight = torch.randn(4 * 256, 256) * (torch.rand(4 * 256, 256) < 0.2)
    rows = (weight != 0).sum(1).reshape(4, 256).numpy()
    small = replace(H200, multiprocessors=16)
    found = plan_kernel("lstm", rows, 256, batch=3, device=small)
    packed = pack(
        weight,
        gates=4,
        programs=found.programs,
        threads=found.block_slots,
        value_type=torch.bfloat16,
        depth=found.depth,
    )
    spec = FastSpec.of(found, reverse=True)
    assert spec.depth == found.depth == packed.layout.depth
    assert spec.rows >= packed.layout.units.shape[1]
    assert spec.slots >= packed.layout.slots.shape[2]
    assert (spec.batch, spec.programs, spec.reverse) == (3, 16, True)
    with pytest.raises(CapacityError):
        pack(
            weight,
            gates=4,
            programs=found.programs,
            threads=found.block_slots,
            value_type=torch.bfloat16,
            depth=found.depth - 1,
        )


@pytest.mark.parametrize("cell", sorted(CELLS))
@pytest.mark.parametrize("arch", sorted(DEVICES))
def test_denser_is_slower_until_it_does_not_fit(cell: str, arch: str) -> None:
    times = []
    for density in (0.01, 0.05, 0.1, 0.3, 0.6, 1.0):
        try:
            found = plan(cell, 3072, density, arch=arch)
        except CapacityError:
            times.append(float("inf"))
            continue
        cut: Any = {"frugal": found.shape.frugal, "segments": found.shape.segments}
        most = register_words(cell, "forward", "bf16", found.warps, found.shape.columns, **cut)
        assert found.register_words <= most
        assert found.shared_bytes <= found.device.shared_bytes
        assert found.register_words + found.shared_words == found.words
        times.append(found.step_us)
    assert times == sorted(times)
    assert times[0] < float("inf")
    assert times[-1] == float("inf") or cell not in ("gru", "lstm")


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(
        CapacityError, match=r"not fit on H200: 8 warps need \d+ .*; a density of about"
    ):
        plan("lstm", 5632, 0.3)


def test_what_would_fit_does() -> None:
    with pytest.raises(CapacityError) as error:
        plan("lstm", 5632, 0.3)
    found = re.search(r"of about ([\d.]+)% would fit, or about (\d+) units", str(error.value))
    assert found is not None
    assert plan("lstm", 5632, 0.95 * float(found[1]) / 100).depth
    assert plan("lstm", int(0.95 * int(found[2])), 0.3).depth
    with pytest.raises(CapacityError, match=r"the states of 60000 units take [\d,]+ bytes, of"):
        plan_kernel("rnn_tanh", np.ones((1, 60000), int), 60000, batch=4, device=H200)


@pytest.mark.parametrize("cell", sorted(CELLS))
def test_backward_has_limits_of_its_own(cell: str) -> None:
    """It exchanges all gates, and its launches take four columns."""
    gates = cell_of(cell).gates
    rows = np.full((1, 1152), int(0.1 * 1152 * gates))
    found = plan_kernel(cell, rows, gates * 1152, batch=8, device=H200, part="backward")
    assert found.part == FastSpec.of(found).part == "backward"
    assert found.shape.columns == 4
    segments = found.shape.segments
    most = register_words(cell, "backward", "bf16", found.warps, 4, segments=segments)
    assert found.register_words <= most


def test_planned_kernels_run_in_slices_of_their_own() -> None:
    weight = torch.randn(4 * 64, 64) * (torch.rand(4 * 64, 64) < 0.2)
    small = replace(H200, multiprocessors=2)
    fast = Fast.planned(weight, "lstm", 8, launch=FastLauncher(), device=small)
    assert [(s.part, s.batch) for s in fast.specs] == [("forward", 8), ("backward", 4)]


def test_words_of_fp32_take_twice_the_room() -> None:
    rows = np.full((4, 2304), 460)
    half = plan_kernel("lstm", rows, 2304, batch=4, device=H200)
    whole = plan_kernel("lstm", rows, 2304, batch=4, device=H200, value="fp32")
    assert whole.shared_words > half.shared_words
    assert whole.step_us > half.step_us


def test_limits() -> None:
    with pytest.raises(CapacityError, match="a 16-bit index counts 65536"):
        plan_kernel("rnn_tanh", np.ones((1, 4), int), 1 << 17, batch=1, device=H200)
    with pytest.raises(InputError, match="known: sm_80, sm_90, sm_100"):
        device_of("sm_70")


def test_resident_blocks() -> None:
    found = Compiled(
        arch="sm_90", ptx="", sass="", warps=8, registers=128, stack_bytes=0, shared_bytes=1000
    )
    assert resident_blocks(found) == 2  # 2 * 8 * 32 * 128 registers are all
    assert resident_blocks(replace(found, registers=129)) == 1
    assert resident_blocks(replace(found, shared_bytes=150 << 10)) == 1
    assert resident_blocks(replace(found, shared_bytes=240 << 10)) == 0
    assert resident_blocks(replace(found, registers=16, warps=32)) == 2  # by threads


def test_a_plan_knows_the_shared_memory(tmp_path: Path) -> None:
    """States of a length that is no power of two, words behind them, and sums."""
    rows, values = np.full((1, 320), 300), get_args(Value)
    specs, held_bytes = [], []
    for batch, value in zip((4, 2, 3), values, strict=True):
        small = replace(H200, multiprocessors=8)
        found = plan_kernel("rnn_tanh", rows, 320, batch=batch, value=value, device=small)
        shape = replace(found.shape, shared_words=found.shape.segments)
        specs.append(FastSpec.of(replace(found, shape=shape)))
        held = shape.shared_words * found.threads * (8 if value == "fp32" else 4)
        held_bytes.append(own_bytes(320, shape.columns, found.block_slots, value) + held)
    specs.append(replace(specs[0], sync="counter"))
    held_bytes.append(held_bytes[0])
    specs = [for_triton(spec) for spec in specs]
    orders = [fast_order(s, write(emit_fast(s), tmp_path), arch="sm_90") for s in specs]
    compiled = compile_all(orders)
    for spec, each, nbytes in zip(specs, compiled, held_bytes, strict=True):
        assert each.shared_bytes <= nbytes if spec.inline else each.shared_bytes == nbytes
        assert not check(spec, each).faults
    end = -1 if specs[0].inline else None  # by PTX there is one behind the loop
    states, sums = re.findall(r".*BAR\.SYNC.*\n", compiled[0].sass)[:end][-2:]
    for barrier in (states, sums):
        without = replace(compiled[0], sass=compiled[0].sass.replace(barrier, ""))
        assert check(specs[0], without).faults == ("1 barriers a step",)
    states, _, _ = re.findall(r".*BAR\.SYNC.*\n", compiled[3].sass)[:end][-3:]
    without = replace(compiled[3], sass=compiled[3].sass.replace(states, ""))
    assert any("states are read before" in fault for fault in check(specs[3], without).faults)


@pytest.mark.long
@pytest.mark.parametrize(("cell", "hidden", "density"), [("lstm", 2304, 0.3), ("gru", 4608, 0.1)])
def test_four_slots_of_a_thread_do_not_spill(
    cell: str, hidden: int, density: float, tmp_path: Path
) -> None:
    """In training, which stores most; the table of registers is probed with two slots."""
    found = plan(cell, hidden, density, arch="sm_80")
    spec = for_triton(FastSpec.of(found, save=True))
    assert (spec.segments, spec.batch) == (4, 4)
    (compiled,) = compile_all([fast_order(spec, write(emit_fast(spec), tmp_path), arch="sm_80")])
    assert not check(spec, compiled).faults


@pytest.mark.parametrize(
    ("cell", "hidden", "density"),
    [("rnn_tanh", 11072, 0.1), ("gru", 6336, 0.1), ("lstm", 5440, 0.1), ("lstm", 7552, 0.05)],
)
def test_large_models_fit(cell: str, hidden: int, density: float) -> None:
    found = plan(cell, hidden, density)
    assert found.shape.segments > 1  # or rows are cut too coarsely
    assert found.shape.columns == 2  # or the states take twice the memory
    spec = FastSpec.of(found)
    assert spec.element_bytes == 4
    assert spec.depth == found.depth
    assert spec.nonzeros == found.words


def test_few_columns_are_gathered_in_32_bits() -> None:
    for value, most in (("bf16", 2), ("fp16", 2), ("fp32", 1)):
        assert [element_bytes(value, b) for b in (most, most + 1)] == [4, 8]  # type: ignore[arg-type]
    assert own_bytes(1024, 2, 256, "bf16") == 4 * 1024 + 8 * 256
    assert own_bytes(1024, 3, 256, "bf16") == 8 * 1024 + 16 * 256
    assert own_bytes(1024, 5, 256, "bf16") == 16 * 1024 + 24 * 256


# --- launches ---

GOOD: dict[str, Any] = {"multiprocessors": 132, "capability": (9, 0), "triton": (3, 7)}


def test_a_device_that_fits() -> None:
    check_device(132, **GOOD)
    assert triton_version() >= (3, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capability": (7, 5)}, "compute capability 7.5: the kernels need 8.0"),
        ({"triton": (3, 5)}, "triton 3.5: the fast kernels need 3.6"),
        ({"multiprocessors": 108}, "132 blocks cannot run at once on 108 multiprocessors"),
    ],
)
def test_a_device_that_does_not(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        check_device(132, **(GOOD | change))


LARGE = {"multiprocessors": 100, "registers_each": 65536, "shared_each": 200_000}


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "message"),
    [
        (255, 150_000, None),
        (128, 90_000, None),
        (100, 220_000, r"220,000 bytes .* has 200,000: 20 words less per thread would fit"),
        (260, 1000, r"256 threads takes 260 registers each, .* has 65,536: 256 would fit"),
    ],
)
def test_a_compiled_kernel_fits(registers: int, shared_bytes: int, message: str | None) -> None:
    spec = FastSpec.of(plan("lstm", 256, 0.3))
    assert (spec.programs, spec.threads) == (132, 256)
    if message is None and shared_bytes < 100_000:
        check_resident(spec, registers=registers, shared_bytes=shared_bytes, **LARGE)
        return
    message = message or "100 multiprocessors hold 1 each: plan for 100 blocks or fewer"
    with pytest.raises(KernelError, match=message):
        check_resident(spec, registers=registers, shared_bytes=shared_bytes, **LARGE)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelError, match="triton is not installed"):
        triton_version()


def test_a_launch_on_the_cpu_is_refused() -> None:
    fast = Fast(
        torch.eye(8), "rnn_tanh", 1, launch=FastLauncher(), programs=2, shape=Shape(warps=2)
    )
    with pytest.raises(KernelError, match="run on a GPU, the tensors are on cpu"):
        fast.forward(torch.zeros(1, 1, 8), None, torch.zeros(1, 8), None)
