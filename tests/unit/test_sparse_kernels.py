"""The generated reference kernels, on interleaved blocks with weak memory, and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.compile import Order, compile_all, order_of
from graphpar.codegen.sparse_rnn.emit import emit, write
from graphpar.codegen.sparse_rnn.interleave import DeadlockError
from graphpar.codegen.sparse_rnn.reference import Exchange, Reference
from graphpar.codegen.sparse_rnn.spec import KernelSpec
from graphpar.errors import CapacityError, KernelError
from tests.unit.sparse_kernels import Case, launcher, run

CLOSE, ROUNDED = 2e-6, 4e-2
SPEC = KernelSpec(
    cell_name="lstm",
    part="forward",
    hidden=257,
    batch=3,
    programs=8,
    depth=16,
    threads=256,
    rows=64,
    slots=4,
)


@pytest.mark.parametrize("cell", sorted(CELLS))
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=3, steps=2),
        Case(batch=1, steps=3, hidden=64, sync="counter", launches=1, threads=128),
        Case(batch=2, steps=2, reverse=True, launches=1, seed=1),
        Case(batch=3, steps=2, state="bf16", launches=1, seed=2),
    ],
    ids=["plain", "counter", "reverse", "bf16"],
)
def test_equals_the_stepwise_products(cell: str, case: Case, tmp_path: Path) -> None:
    worst = run(replace(case, cell=cell), tmp_path)
    limit = CLOSE if case.state == "fp32" else ROUNDED
    assert len(worst) >= 3
    assert max(worst.values()) < limit, worst
    assert case.state == "fp32" or max(worst.values()) > CLOSE


@pytest.mark.parametrize(
    ("hidden", "batch", "steps", "threads"), [(257, 1, 1, 256), (64, 5, 1, 64), (33, 1, 9, 64)]
)
def test_sizes(hidden: int, batch: int, steps: int, threads: int, tmp_path: Path) -> None:
    case = Case(
        cell="gru",
        hidden=hidden,
        batch=batch,
        steps=steps,
        threads=threads,
        launches=1,
        density=0.1,
    )
    worst = run(replace(case, programs=4), tmp_path)
    assert max(worst.values()) < CLOSE, worst


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_no_and_all_weights(density: float, tmp_path: Path) -> None:
    worst = run(Case(density=density, launches=1, hidden=17), tmp_path)
    assert max(worst.values()) < CLOSE, worst


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sync", ["lamport", "counter"])
@pytest.mark.parametrize("cell", sorted(CELLS))
def test_many_schedules(cell: str, sync: str, seed: int, tmp_path: Path) -> None:
    case = Case(
        cell=cell,
        sync=sync,
        seed=seed,
        hidden=(16, 33, 40)[seed % 3],
        batch=1 + seed % 4,
        steps=1 + seed % 5,
        programs=1 + seed % 5,
        threads=256,
        reverse=bool(seed % 2),
        state=("fp32", "bf16")[seed // 2 % 2],
    )
    worst = run(case, tmp_path)
    assert max(worst.values()) < (CLOSE if case.state == "fp32" else ROUNDED), worst


# Each is a fault that a kernel could have: what to replace, by what, and how it must show.
MUTANTS = {
    "plain load in the poll": (Case(), ", volatile=True", "", DeadlockError),
    "no wait": (Case(), "while late > 0:", "while late > 1:", None),
    "no new epoch": (Case(), ", (now + 1))", ", now)", DeadlockError),
    "one buffer": (Case(steps=5), "((step + 1) & 1)", "(step & 1)", DeadlockError),
    "wrong slot": (
        Case(),
        "tl.gather(total, slots_0, 0)",
        "tl.gather(total, slots_0 ^ 1, 0)",
        None,
    ),
    "relaxed arrival": (Case(sync="counter"), 'sem="release"', 'sem="relaxed"', None),
    "relaxed meeting": (Case(sync="counter"), 'sem="acquire"', 'sem="relaxed"', None),
    "no arrival": (
        Case(sync="counter"),
        "        arrive(counter_ptr)",
        "        pass",
        DeadlockError,
    ),
    "no meeting": (Case(sync="counter"), "late < 0", "late < -99", None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    """On three schedules out of three: as a deadlock, or as wrong numbers."""
    case, old, new, error = MUTANTS[name]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    for seed in range(3):
        mutant = replace(case, edit=edit, seed=seed, launches=1, patience=60, batch=2)
        if error is not None:
            with pytest.raises(error):
                run(mutant, tmp_path)
        else:
            worst = run(mutant, tmp_path)
            assert max(worst.values()) > 1e-3, worst


@pytest.mark.parametrize("sync", ["lamport", "counter"])
def test_clocks_wrap_around(sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Exchange.of

    def late(spec: KernelSpec, device: torch.device) -> Exchange:
        found = made(spec, device)
        found.clock[:] = torch.tensor([2**31 - 3, 2**31 - 2 * spec.programs])
        found.counter[:] = 2**31 - 2 * spec.programs
        return found

    monkeypatch.setattr(Exchange, "of", late)
    assert max(run(Case(sync=sync, steps=3, launches=3, hidden=17), tmp_path).values()) < CLOSE


def test_a_launch_can_be_replayed(tmp_path: Path) -> None:
    """As a CUDA graph does: no argument changes from launch to launch but what memory holds."""
    seen = []

    def start(kernel: Any, programs: int, arguments: Mapping[str, Any]) -> None:
        seen.append({k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in arguments.items()})

    reference = Reference(
        torch.eye(9), "rnn_tanh", 1, launch=start, programs=2, threads=64, folder=tmp_path
    )
    for _ in range(2):
        reference.forward(torch.zeros(3, 1, 9), None, torch.zeros(1, 9), None)
    changed = {name for name, value in seen[0].items() if seen[1][name] != value}
    assert changed <= {"gates_ptr", "bias_ptr", "h_ptr", "c_ptr", "out_ptr", "c_out_ptr"}
    assert reference.exchanges[0].clock.tolist() == [1 + 2 * 4, 2 * 3 * 2]


def test_new_values_and_a_grown_pattern(tmp_path: Path) -> None:
    weight = torch.eye(9)
    reference = Reference(
        weight, "rnn_tanh", 1, launch=launcher(Case()), programs=2, threads=64, spin=False,
        folder=tmp_path,
    )  # fmt: skip
    x, h = torch.zeros(1, 1, 9), torch.rand(1, 9)
    assert reference.update(2 * weight)
    torch.testing.assert_close(reference.forward(x, None, h, None)[0][0], torch.tanh(2 * h))
    assert not reference.update(torch.ones(9, 9))


def test_a_watchdog_is_an_error(tmp_path: Path) -> None:
    """The flag that a thread raises when it gives up."""

    def broken(kernel: Any, programs: int, arguments: Mapping[str, Any]) -> None:
        arguments["error_ptr"].fill_(1)

    reference = Reference(
        torch.eye(9), "rnn_tanh", 1, launch=broken, programs=2, threads=64, folder=tmp_path
    )
    for _ in range(2):
        with pytest.raises(KernelError, match="waited in vain"):
            reference.forward(torch.zeros(1, 1, 9), None, torch.zeros(1, 9), None)


def test_the_text(tmp_path: Path) -> None:
    text = emit(SPEC)
    assert text == emit(replace(SPEC))
    assert "generated by graphpar" in text
    assert "arXiv 1804.10223" in text
    path = write(text, tmp_path)
    assert path.read_text() == text
    assert write(text, tmp_path) == path
    assert write(emit(replace(SPEC, hidden=256)), tmp_path) != path
    assert len(list(tmp_path.iterdir())) == 2


def test_a_kernel_too_large_for_a_tensor() -> None:
    with pytest.raises(CapacityError, match="Triton takes 1048576"):
        replace(SPEC, depth=8192)


# --- compiled ---


def orders(specs: list[KernelSpec], folder: Path, archs: tuple[str, ...]) -> list[Order]:
    return [order_of(s, write(emit(s), folder), arch=arch) for s in specs for arch in archs]


def test_compiles_without_a_gpu(tmp_path: Path) -> None:
    """To machine code: no spills, a strong load in the poll, a strong store to the exchange."""
    small = replace(SPEC, hidden=64, rows=16, batch=2)
    chosen = orders([replace(small, cell_name="rnn_tanh")], tmp_path, ("sm_80", "sm_90", "sm_100"))
    chosen += orders([replace(small, part="backward", cell_name="gru")], tmp_path, ("sm_90",))
    for order, found in zip(chosen, compile_all(chosen), strict=True):
        assert found.arch == order.arch
        assert f".target {order.arch}" in found.ptx
        assert found.stack_bytes == 0
        assert found.registers <= 255
        assert "LDG.E.64.STRONG" in found.sass
        assert "STG.E.64.STRONG" in found.sass


@pytest.mark.long
def test_every_kernel_compiles(tmp_path: Path) -> None:
    specs = [
        replace(each, cell_name=cell, part=part)
        for cell in CELLS
        for part in ("forward", "backward")
        for each in (SPEC, replace(SPEC, state="bf16", sync="counter", batch=4))
    ]
    chosen = orders(specs, tmp_path, ("sm_80", "sm_90", "sm_100"))
    for found in compile_all(chosen):
        assert found.stack_bytes <= 8  # a word outside of registers: these need not be fast


def test_what_the_compiler_says_is_in_the_error(tmp_path: Path) -> None:
    text = emit(SPEC).replace("tl.program_id(0)", "tl.no_such_function()")
    with pytest.raises(KernelError, match="no_such_function"):
        compile_all([order_of(SPEC, write(text, tmp_path), arch="sm_90")])
