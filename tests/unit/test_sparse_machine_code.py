"""The machine code of the fast kernel: what static checks find, and spills at real sizes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.compile import compile_all, fast_order
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.emit import write
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import for_triton
from graphpar.codegen.sparse_rnn.limits import register_words
from graphpar.codegen.sparse_rnn.register_words import REGISTER_WORDS
from graphpar.codegen.sparse_rnn.sass import read
from graphpar.codegen.sparse_rnn.static_checks import Findings, check
from tests.unit.sparse_kernels import FAST_SPEC as SPEC


def findings(
    specs: list[FastSpec], folder: Path, archs: tuple[str, ...], texts: list[str] | None = None
) -> list[Findings]:
    """Of each spec's text, for each architecture."""
    specs = [spec if spec.inline else for_triton(spec) for spec in specs]
    given = [emit_fast(spec) for spec in specs] if texts is None else texts
    pairs = [(s, write(t, folder), a) for s, t in zip(specs, given, strict=True) for a in archs]
    compiled = compile_all([fast_order(spec, path, arch=arch) for spec, path, arch in pairs])
    return [check(spec, found) for (spec, _, _), found in zip(pairs, compiled, strict=True)]


def test_machine_code_is_what_was_planned(tmp_path: Path) -> None:
    for found in findings([SPEC], tmp_path, ("sm_80", "sm_90", "sm_100")):
        assert not found.faults
        assert found.barriers == 2
        assert found.gathers >= SPEC.depth
    two = replace(SPEC, batch=2)
    more = [replace(SPEC, batch=1), replace(two, value="fp32", hidden=64, shared_words=2)]
    more.append(replace(two, cell_name="gru", part="backward", value="fp16", hidden=64))
    more.append(replace(two, cell_name="lstm", segments=2, frugal=True, shared_words=2, save=True))
    assert [f.faults for f in findings(more, tmp_path, ("sm_90",))] == [()] * len(more)


def test_machine_code_by_ptx(tmp_path: Path) -> None:
    """Of what triton 3.6 compiles: a launch finds out whether its buffer is where PTX takes it to
    be, and the compiler shows that it is."""
    lstm = replace(PTX, cell_name="lstm", batch=5, shared_words=2, save=True)
    back = replace(PTX, sync="counter", part="backward", batch=2, hidden=64)
    for spec, archs in ((PTX, ("sm_80", "sm_100")), (lstm, ("sm_90",)), (back, ("sm_90",))):
        path = write(emit_fast(spec), tmp_path)
        for compiled in compile_all([fast_order(spec, path, arch=arch) for arch in archs]):
            found = check(spec, compiled)
            assert not found.faults
            assert found.barriers == (3 if spec.sync == "counter" else 2)
            code = read(compiled.sass)
            before = code.instructions[: code.time_loop[0]]
            written, seen = (
                re.search(rf"{name}\.64 .*?(\[.*?\])", "\n".join(before)) for name in ("STS", "LDS")
            )
            assert written is not None
            assert seen is not None
            assert written[1] == seen[1]


def test_machine_code_of_the_counter_barrier(tmp_path: Path) -> None:
    for found in findings([COUNTER], tmp_path, ("sm_80", "sm_100")):
        assert not found.faults
        assert found.barriers == 3


COUNTER, PTX = replace(SPEC, sync="counter"), replace(SPEC, inline=True)
BARRIER = "tl.debug_barrier()" if for_triton(SPEC).inline else "gl.barrier()"
GATHERED = "tl.debug_barrier()\n        a_0 = "
FAULTS = [
    (SPEC, "weak loads", ", volatile=True", ""),
    (SPEC, "no strong store", ', cache_modifier=".cg"', ""),
    (SPEC, "weights are read again", "word = words[k]",
     "word = gl.load(mine + k * THREADS + step * 0)"),
    (SPEC, "barriers a step", "t = step", f"{BARRIER}\n        {BARRIER}\n        t = step"),
    (PTX, "1 barriers a step", GATHERED, "a_0 = "),
    (COUNTER, "does not acquire", "ld.acquire.gpu", "ld.relaxed.gpu"),
    (COUNTER, "does not release", 'sem="release"', 'sem="relaxed"'),
]  # fmt: skip


def test_static_checks_see_faults(tmp_path: Path) -> None:
    texts = []
    for spec, _, old, new in FAULTS:
        text = emit_fast(spec if spec.inline else for_triton(spec))
        assert old in text
        texts.append(text.replace(old, new))
    specs = [spec for spec, *_ in FAULTS]
    for (_, wanted, *_), found in zip(
        FAULTS, findings(specs, tmp_path, ("sm_90",), texts), strict=True
    ):
        assert any(wanted in fault for fault in found.faults), (wanted, found)


def test_code_behind_the_end_is_no_loop() -> None:
    """What the compiler moved there jumps back into the time loop."""
    lines = [".L_x_1:", "BAR.SYNC 0x0", ".L_x_3:", "LDS R0, [R1]", "@P0 BRA `(.L_x_1)",
             "BAR.SYNC 0x0", "EXIT", "BRA `(.L_x_3)"]  # fmt: skip
    text = [x if x.endswith(":") else f"        /*{i:04x}*/  {x} ;" for i, x in enumerate(lines)]
    assert read("\n".join(text)).time_loop == (0, 2)


def test_spills_and_grids_are_seen(tmp_path: Path) -> None:
    many = replace(SPEC, warps=16, register_words=120, programs=500)
    (found,) = findings([many], tmp_path, ("sm_80",))
    assert any("spills" in fault for fault in found.faults)
    assert any("not resident at once" in fault for fault in found.faults)


@pytest.mark.long
@pytest.mark.parametrize(
    "key", [k for k, w in REGISTER_WORDS.items() if any(w)], ids=lambda key: "-".join(map(str, key))
)
def test_full_sizes(key: tuple[Any, Any, int, bool, str], tmp_path: Path) -> None:
    """The most words in registers that the planner counts on, with every cell's own work: batches
    and architectures take turns."""
    part, value, warps, frugal, name = key
    place = list(REGISTER_WORDS).index(key)
    turn = [b for b, words in zip((2, 4, 8), REGISTER_WORDS[key], strict=True) if words]
    batch = turn[place % len(turn)]
    cells = [cell for cell in sorted(CELLS) if cell.startswith(name)]
    spec = replace(
        SPEC,
        part=part,
        value=value,
        hidden=2304,
        programs=108,
        rows=64,
        save=True,
        cell_name=cells[place % len(cells)],
        warps=warps,
        batch=batch,
        slots=8,
        frugal=frugal,
        register_words=register_words(cells[0], part, value, warps, batch, frugal=frugal),
        shared_words=8,
    )
    (found,) = findings([spec], tmp_path, (tuple(DEVICES)[place // 3 % 3],))
    # The states of wide backwards take more than a block has: see the planner.
    assert not [f for f in found.faults if "resident" not in f or found.registers > 255]
