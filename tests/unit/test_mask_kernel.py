"""The kernel of a seeded dropout, in Triton's interpreter, against torch's ops; and compiled."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphpar import ops
from graphpar.codegen.sparse_rnn.compile import Compiled, Order, compile_all
from graphpar.codegen.sparse_rnn.devices import DEVICES, WARP
from graphpar.codegen.sparse_rnn.emit import load
from graphpar.cost import find_hardware
from graphpar.cost.hardware import PHILOX_INSTRUCTIONS
from graphpar.ops import mask_kernel, mask_launch, philox, seeded
from graphpar.ops.mask_launch import TYPES, Runs, arguments, masked_part, runs_of
from graphpar.types import Shard, local_shape

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # numpy
CPU = torch.device("cpu")
SEED, STREAM = 2**62 + 12345, (3, 9)
RATES = (0.0, 0.1, 0.5, 0.93, 1 - 2**-16)
Layout = tuple[tuple[int, ...], int, tuple[int, ...], int, int, int]


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit by bit, signs of zeros too; any nan is any other."""
    nan = expected.isnan()
    if not found.isnan().equal(nan) or found.stride() != expected.stride():
        return False
    return found[~nan].view(torch.uint8).equal(expected[~nan].view(torch.uint8))


def exact(dtype: torch.dtype, p: float) -> bool:
    """Triton's interpreter rounds to bfloat16 wrongly, unless there is nothing to round."""
    return dtype != torch.bfloat16 or math.frexp(1 / (1 - p))[0] == 0.5


def by_ops(x: Tensor, p: float, *layout: Any) -> Tensor:
    mask = philox.keep_mask(x.shape, 1 - p, SEED, STREAM, CPU, *layout)
    return (x * mask).mul_(1 / (1 - p))


@st.composite
def layouts(draw: Any) -> Layout:
    """Shape of a rank's part, dim, blocks, rank, ranks, units."""
    ranks = draw(st.integers(1, 5))
    units = draw(st.sampled_from([0, ranks, ranks + 1, 2 * ranks + 1]))
    sizes = st.sampled_from([1, 2, 3, 8, 16])
    blocks = tuple((units or ranks) * draw(sizes) for _ in range(draw(st.integers(1, 3))))
    before = draw(st.lists(st.sampled_from([1, 2, 3, 5, 11]), max_size=2))
    after = draw(st.lists(st.sampled_from([1, 3, 4, 7, 8]), max_size=2))
    dim, rank = len(before), draw(st.integers(0, ranks - 1))
    shape = local_shape((*before, sum(blocks), *after), Shard(dim, blocks, units), rank, ranks)
    return shape, dim, blocks, rank, ranks, units


@given(layouts(), st.sampled_from(TYPES), st.sampled_from(RATES))
@settings(suppress_health_check=[HealthCheck.too_slow])
@example(((2, 8, 24), 2, (48,), 1, 2, 0), torch.float32, 0.1)  # aligned, several runs
@example(((3, 8, 7), 1, (16, 16), 1, 4, 0), torch.float64, 0.1)  # heads that differ by run
@example(((5, 13), 0, (), 0, 1, 0), torch.float16, 0.93)  # the whole
@example(((70, 1, 33), 1, (2,), 1, 2, 0), torch.float32, 0.5)  # more than one program
@example(((9, 2, 256), 1, (4,), 1, 2, 0), torch.bfloat16, 0.5)
def test_equals_the_products_of_torch(layout: Layout, dtype: torch.dtype, p: float) -> None:
    shape, rest = layout[0], layout[1:]
    x = torch.randn(shape).where(torch.rand(shape) > 0.1, -0.0).to(dtype)
    found, expected = masked_part(x, SEED, STREAM, p, *rest), by_ops(x, p, *rest)
    if exact(dtype, p):
        assert same(found, expected)
    else:
        assert found.signbit().equal(expected.signbit())
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_values_that_are_no_numbers_and_strides(dtype: torch.dtype) -> None:
    x = torch.randn(6, 33, dtype=dtype)
    tiny = 0.0 if dtype == torch.bfloat16 else torch.finfo(dtype).smallest_normal / 4
    x[0, :7] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, tiny, -tiny])
    dense, spread = x.view(6, 3, 11).transpose(0, 2), torch.randn(4, 1, 5, dtype=dtype)
    for y in (x, x.t(), dense, x[:, ::2], spread.expand(4, 3, 5), x[0, 0], x[:1].t()):
        found = masked_part(y, SEED, STREAM, 0.5)
        assert found.stride() == torch.empty_like(y).stride()
        assert same(found, torch.empty_like(y).copy_(by_ops(y, 0.5)))


def test_no_elements_and_no_rate() -> None:
    assert masked_part(torch.empty(3, 0), SEED, STREAM, 0.5).shape == (3, 0)
    assert not list(runs_of((0, 4), 0, (3,), 3, 4, 3))
    with pytest.raises(ZeroDivisionError):
        by_ops(torch.ones(8), 1.0)
    with pytest.raises(ZeroDivisionError):
        masked_part(torch.ones(8), SEED, STREAM, 1.0)


FAR = 8 << 32
PLACES = {
    "over the first word": Runs(runs=1, length=1024, start=FAR - 512, stride=0, offset=0, pitch=0),
    "far, in the middle of a counter": Runs(
        runs=1, length=61, start=3 * FAR + 5, stride=0, offset=0, pitch=0
    ),
    "far runs": Runs(runs=3, length=16, start=8, stride=FAR + 24, offset=8, pitch=40),
    "far odd runs": Runs(runs=11, length=19, start=FAR - 80, stride=23, offset=3, pitch=29),
}


def at_place(part: Runs, seed: int, p: float, **changed: int) -> tuple[Tensor, Tensor]:
    """What the kernel writes and what it should, with what it is to leave alone."""
    count, room = part.offset + part.runs * max(part.pitch, part.length), 1 << 14
    x = torch.randn(count + 2 * room)[room:-room]
    whole = torch.full((count + 2 * room,), -7.0)
    out, expected = whole[room:-room], whole.clone()[room:-room]
    blocks, numbers, constants = arguments(part, seed, STREAM, p)
    mask_kernel.masked[(blocks,)](x, out, *numbers, **{**constants, **changed})
    shape = part.runs, part.start, part.stride, part.length
    mask = philox._kept(*shape, 1 - p, seed, STREAM, CPU)
    for run, kept in enumerate(mask):
        here = slice(part.offset + run * part.pitch, part.offset + run * part.pitch + part.length)
        expected[here] = (x[here] * kept).mul_(1 / (1 - p))
    return out, expected


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("seed", [0, 1, SEED, 2**64 - 3, -5])
def test_counters_and_seeds_of_more_than_a_word(name: str, seed: int) -> None:
    for changed in ({}, {"WIDE": True}, {"RUNS": True}):
        assert same(*at_place(PLACES[name], seed, 0.3, **changed))


def test_a_launch_of_many_lanes_counts_in_64_bits() -> None:
    part = Runs(runs=1, length=2**34, start=0, stride=0, offset=0, pitch=0)
    blocks, _, constants = arguments(part, SEED, STREAM, 0.5)
    assert constants["WIDE"]
    assert blocks * mask_kernel.BLOCK * 8 == 2**34
    assert not arguments(replace(part, length=2**33), SEED, STREAM, 0.5)[2]["WIDE"]


def test_the_op_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, where it can; on the CPU it is not taken."""
    calls: list[tuple[int, ...]] = []

    def noted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(tuple(x.shape))
        return masked_part(x, *rest)

    monkeypatch.setattr(seeded, "masked_part", noted)
    seed, x = torch.tensor([SEED, 2]), torch.randn(5, 12, requires_grad=True)
    part = 1, (48,), 3, 4

    def run() -> tuple[Tensor, Tensor]:
        out = seeded.part_dropout(x, seed, 0.3, 4, *part)
        return out, torch.autograd.grad(out, x, torch.ones_like(out))[0]

    run()
    assert not calls
    monkeypatch.setattr(seeded, "runs_here", lambda _: True)
    assert all(map(same, run(), (by_ops_of(y, 4, 2, *part) for y in (x, torch.ones_like(x)))))
    assert calls == [(5, 12)] * 2
    whole = ops.seeded_dropout(x, seed, 0.3, 4)
    assert same(whole, by_ops_of(x, 4, 2))


def by_ops_of(x: Tensor, number: int, call: int, *layout: Any) -> Tensor:
    mask = philox.keep_mask(x.shape, 1 - 0.3, SEED, (number, call), CPU, *layout)
    return (x * mask).mul_(1 / (1 - 0.3))


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = mask_launch._compiles.__wrapped__
    monkeypatch.setattr(mask_launch, "_compiles", fresh)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    probes: list[Any] = []
    monkeypatch.setattr(mask_launch, "masked_part", lambda *a: probes.append(a))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    device = torch.device("cuda", 1)
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=device)
    assert mask_launch.runs_here(x)
    assert len(probes) == 1
    for other in ({"is_cuda": False}, {"dtype": torch.complex64}):
        assert not mask_launch.runs_here(SimpleNamespace(**{**vars(x), **other}))  # type: ignore[arg-type]

    def refuse(*_: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(mask_launch, "masked_part", refuse)
    with pytest.warns(UserWarning, match="torch's ops, since triton refuses: no C compiler"):
        assert not mask_launch.runs_here(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not mask_launch.runs_here(x)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not mask_launch.runs_here(x)


MUTANTS = {
    "half-words swapped": ("words & 0xFFFF, words >> 16", "words >> 16, words & 0xFFFF"),
    "words swapped": ("tl.join(w0, w2)", "tl.join(w2, w0)"),
    "no upper word": ("counter >> 32", "counter >> 33"),
    "streams swapped": (
        "number.to(tl.uint32), call.to(tl.uint32)",
        "call.to(tl.uint32), number.to(tl.uint32)",
    ),
    "heads forgotten": ("column * 8 - first % 8", "column * 8"),
    "a start too far": ("first = start + run", "first = start + 8 + run"),
    "one start for all runs": ("start + run.to(tl.int64) * stride", "start + run * 0"),
    "one place for all runs": ("run.to(tl.int64) * pitch", "run * 0"),
    "into the run before": ("(i >= 0) & ", ""),
    "into the run behind": (" & (i < length)", ""),
    "kept at the limit": ("half < limit", "half <= limit"),
    "zeros are dropped": ("x.to(computed) * factor", "tl.where(factor > 0, x * factor, 0.0)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_of_the_kernel_are_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = MUTANTS[name]
    text = Path(mask_kernel.__file__).read_text()
    assert text.count(old) == 1
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new))
    monkeypatch.setattr(mask_kernel, "masked", load(path).masked)
    word, *_ = philox.philox((1, 0, *STREAM), philox.words_of(SEED))
    rates = 0.3, 1 - (word & 0xFFFF) / 2**16  # element 8 is at the limit
    assert not all(same(*at_place(part, SEED, p)) for part in PLACES.values() for p in rates)


def test_a_wrong_interval_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layout = torch.randn(3, 8, 7), (1, (16, 16), 1, 4, 0)
    for change in ({"start": 1}, {"stride": 8}, {"pitch": -1}):

        def wrong(*given: Any, change: dict[str, int] = change) -> Iterator[Runs]:
            for part in runs_of(*given):
                yield replace(part, **{k: getattr(part, k) + v for k, v in change.items()})

        monkeypatch.setattr(mask_launch, "runs_of", wrong)
        assert not same(masked_part(x, SEED, STREAM, 0.3, *layout), by_ops(x, 0.3, *layout))


def order(dtype: str, arch: str, *, runs: bool = False, aligned: bool = True) -> Order:
    names = mask_kernel.masked.arg_names
    types = dict.fromkeys(names[:2], f"*{dtype}") | dict.fromkeys(names[2:14], "i64")
    constants = {"RUNS": runs, "ALIGNED": aligned, "WIDE": False, "BLOCK": mask_kernel.BLOCK}
    return Order(
        path=Path(mask_kernel.__file__),
        name="masked",
        types=types | {"limit": "i32"},
        constants=constants,
        arch=arch,
        warps=mask_kernel.WARPS,
    )


SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
EACH = mask_kernel.BLOCK // (WARP * mask_kernel.WARPS)  # counters of a thread


def test_compiled_it_moves_128_bits_and_makes_each_word_once() -> None:
    orders = [order(dtype, "sm_90", runs=dtype in ("fp16", "fp64")) for dtype in SIZES]
    orders += [order("bf16", "sm_80", runs=True), order("fp32", "sm_80")]
    orders += [order("bf16", "sm_90", runs=True, aligned=False)]
    for made, found in zip(orders, compile_all(orders), strict=True):
        dtype = made.types["x_ptr"][1:]
        assert found.stack_bytes == 0, made
        assert 15 * EACH <= found.ptx.count("mul.hi.u32") <= 20 * EACH, made
        assert found.ptx.count("mul.f64" if dtype == "fp64" else "mul.f32") == 8 * EACH
        if SIZES[dtype] == 2:  # rounded to the nearest, once
            cast = f"cvt.rn.{dtype.replace('fp', 'f')}"
            count = found.ptx.count(f"{cast}.f32") + 2 * found.ptx.count(f"{cast}x2.f32")
            assert count == 8 * EACH
        if made.constants["ALIGNED"]:
            vectors = 8 * EACH * SIZES[dtype] // 16
            for access in ("LDG.", "STG."):
                assert found.sass.count(f"{access}E.128") == found.sass.count(access) == vectors
            assert_hidden(found, SIZES[dtype])


def assert_hidden(found: Compiled, size: int) -> None:
    """A multiprocessor issues four instructions of a warp per clock (NVIDIA, CUDA C++ Programming
    Guide, Compute Capability 8.x and 9.0); all of the kernel's take less time than its traffic."""
    each = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", found.sass, re.MULTILINE)) / (8 * EACH)
    device = DEVICES[found.arch]
    names = {"sm_80": ("a100-40gb", "a100-80gb"), "sm_90": ("h100", "h200")}[found.arch]
    for hardware in map(find_hardware, names):
        issued = hardware.multiprocessors * device.clocks_per_us * 4 * WARP
        assert each / issued < 2 * size / hardware.memory_bytes_per_us


def test_the_cost_model_counts_philox_as_it_is_compiled() -> None:
    for found in compile_all([order("bf16", "sm_80"), order("bf16", "sm_90")]):
        count = (
            len(re.findall(r"^\s+/\*\w+\*/\s+(?:IMAD\.HI|IMAD|LOP3)\b", found.sass, re.M)) / EACH
        )
        assert PHILOX_INSTRUCTIONS <= count <= 1.5 * PHILOX_INSTRUCTIONS
