"""The fast kernel: its text in the interpreter, through a shim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from graphpar.codegen.sparse_rnn import stepwise
from graphpar.codegen.sparse_rnn.cells import CELLS
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.exchange import TYPES, Exchange
from graphpar.codegen.sparse_rnn.fast import Fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.gluon_shim import load_fast
from graphpar.codegen.sparse_rnn.interleave import DeadlockError, Schedule, launch
from graphpar.codegen.sparse_rnn.limits import Value
from graphpar.codegen.sparse_rnn.plan import Shape
from graphpar.errors import CapacityError, InternalError, KernelError
from tests.unit.sparse_kernels import FAST_SPEC as SPEC
from tests.unit.sparse_kernels import note


def run(
    cell: str,
    folder: Path,
    *,
    hidden: int = 33,
    batch: int = 3,
    steps: int = 2,
    seed: int = 0,
    launches: int = 1,
    edit: Callable[[str], str] = lambda text: text,
    programs: int = 3,
    backward: bool = False,
    inline: bool = False,
    **options: Any,
) -> dict[str, float]:
    """The largest differences from products of the same rounded weights in float32."""
    torch.manual_seed(seed)
    shape = CELLS[cell].gates * hidden, hidden
    value = options.get("value", "bf16")
    weight = (0.3 * torch.randn(shape) * (torch.rand(shape) < 0.2)).to(TYPES[value]).float()

    def start(spec: FastSpec, blocks: int, arguments: Mapping[str, Any]) -> None:
        module = load_fast(edit(emit_fast(replace(spec, inline=inline))), folder)
        shared = [v for k, v in arguments.items() if k in ("exchange_ptr", "counter_ptr")]
        schedule = Schedule(seed=seed, weak=True, shared=shared, patience=100)
        launch(getattr(module, spec.part), blocks, {**arguments, "SPIN": False}, schedule)

    cut = Shape(
        warps=4,
        shared_words=options.pop("shared_words", 0),
        segments=options.pop("segments", 1),
        frugal=options.pop("frugal", False),
    )
    fast = Fast(weight, cell, batch, launch=start, programs=programs, shape=cut, **options)
    for exchange in fast.exchanges:
        exchange.words.random_(-(2**62), 0)
    worst: dict[str, float] = {}
    lstm, reverse = cell == "lstm", options.get("reverse", False)
    for _ in range(launches):
        x, bias = torch.randn(steps, batch, shape[0]), 0.2 * torch.randn(shape[0])
        h = 0.3 * torch.randn(batch, hidden)
        c = torch.randn(batch, hidden) if lstm else None
        found = fast.forward(x, bias, h, c)
        wanted = stepwise.forward(x, weight, bias, None, h, c, cell, reverse, True)
        note(worst, ("out", "c", "saved"), found, wanted)
        if not backward:
            continue
        dout = torch.randn(steps, batch, hidden)
        dc = torch.randn(batch, hidden) if lstm else None
        back = fast.backward(dout, dc, wanted[0], wanted[2], h, c)
        wanted_back = stepwise.backward(
            dout, dc, wanted[0], wanted[2], weight, None, h, c, cell, reverse
        )
        note(worst, ("dgates", "drecurrent", "dh", "dc"), back, wanted_back)
    return worst


LIMIT = 3e-2
"""States are rounded to bf16, relative 2^-8, at every step, and values of relu reach 4."""


@pytest.mark.parametrize("cell", sorted(CELLS))
def test_equals_the_products(cell: str, tmp_path: Path) -> None:
    worst = run(cell, tmp_path, launches=2, backward=True)
    assert {"out", "dgates", "dh"} <= worst.keys()
    assert 0 < max(worst.values()) < LIMIT, worst


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {"batch": 5, "hidden": 40, "shared_words": 3, "backward": True}),
        ("gru", {"batch": 1, "steps": 3, "reverse": True, "backward": True}),
        ("gru", {"batch": 8, "hidden": 20, "save": False}),
        ("rnn_relu", {"batch": 2, "hidden": 257, "steps": 1, "programs": 4}),
        ("lstm", {"value": "fp16", "sync": "counter", "launches": 2, "backward": True}),
        ("gru", {"value": "fp16", "shared_words": 2, "batch": 2, "backward": True}),
        ("gru", {"batch": 6, "sync": "counter", "reverse": True, "backward": True}),
        ("rnn_tanh", {"batch": 9, "hidden": 20, "launches": 2, "backward": True}),
        ("lstm", {"batch": 2, "sync": "counter", "backward": True}),
        ("lstm", {"segments": 2, "hidden": 70, "shared_words": 3, "backward": True}),
        ("gru", {"segments": 4, "frugal": True, "batch": 5, "programs": 1, "backward": True}),
        ("lstm", {"inline": True, "segments": 2, "shared_words": 3, "batch": 5, "backward": True}),
        ("gru", {"inline": True, "sync": "counter", "batch": 2, "shared_words": 1}),
    ],
    ids=["two passes, shared words", "one column", "eight columns", "large", "fp16, counter",
         "fp16, shared words", "counter", "slices", "counter, two columns", "two segments",
         "four segments, frugal", "PTX: two passes, shared words", "PTX: counter, two columns"],
)  # fmt: skip
def test_forms(cell: str, options: dict[str, Any], tmp_path: Path) -> None:
    worst = run(cell, tmp_path, **options)
    assert 0 < max(worst.values()) < LIMIT, worst


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {"batch": 3, "shared_words": 3, "segments": 2, "frugal": True}),
        ("gru", {"batch": 1, "sync": "counter", "launches": 2}),
        ("rnn_relu", {"batch": 5, "sync": "counter", "reverse": True}),
        ("rnn_tanh", {"batch": 9, "hidden": 20}),
        ("rnn_relu", {"inline": True, "shared_words": 2}),
    ],
    ids=["shared words", "counter, one column", "counter, three passes", "slices", "PTX"],
)
def test_fp32_is_close(cell: str, options: dict[str, Any], tmp_path: Path) -> None:
    worst = run(cell, tmp_path, value="fp32", backward=True, **options)
    assert {"out", "dgates", "dh"} <= worst.keys()
    assert max(worst.values()) < 1e-5, worst


def test_a_buffer_that_lies_elsewhere_is_an_error(tmp_path: Path) -> None:
    def edit(text: str) -> str:
        assert "!= mark" in text
        return text.replace("!= mark", "!= mark + 1")

    with pytest.raises(KernelError, match="puts shared memory elsewhere"):
        run("rnn_tanh", tmp_path, steps=1, inline=True, edit=edit)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("cell", sorted(CELLS))
def test_many_schedules(cell: str, seed: int, tmp_path: Path) -> None:
    pick = Random(f"{cell} {seed}").choice
    options = {
        "hidden": pick((16, 33, 40)),
        "batch": pick((1, 2, 3, 5, 9)),
        "steps": pick((1, 2, 5)),
        "programs": pick((2, 3, 4, 5)),
        "value": pick(get_args(Value)),
        "sync": pick(("lamport", "counter")),
        "reverse": pick((False, True)),
        "shared_words": pick((0, 1, 2)),
        "segments": pick((1, 2, 4)),
        "frugal": pick((False, True)),
        "inline": pick((False, True)),
    }
    worst = run(cell, tmp_path, seed=seed, launches=2, backward=True, **options)
    assert max(worst.values()) < (1e-5 if options["value"] == "fp32" else LIMIT), options


MUTANTS: dict[str, tuple[dict[str, Any], str, str, type[Exception] | None]] = {
    "plain load in the poll": ({}, ", volatile=True", "", DeadlockError),
    "no new epoch": ({}, ", now + 1)", ", now)", DeadlockError),
    "one buffer": ({}, "((step + 1) & 1)", "(step & 1)", DeadlockError),
    "no wait": ({}, "while late > 0:", "while late > 1:", None),
    "wrong slot": ({}, "gather(slots_0, 0)", "gather(slots_0 ^ 1, 0)", None),
    "halves exchanged": ({}, "(upper << 16) | lower", "(lower << 16) | upper", None),
    "sums never written": ({}, "sums_0.store", "sums_2.store", InternalError),
    "two columns: plain load in the poll": ({"batch": 2}, ", volatile=True", "", DeadlockError),
    "two columns: no wait": ({"batch": 2}, "while late > 0:", "while late > 1:", None),
    "two columns: no new epoch": ({"batch": 2}, ", now + 1)", ", now)", DeadlockError),
    "words under the states": (
        {"shared_words": 3}, "room.index(2 + ", "room.index(0 + ", InternalError,
    ),
    "words beyond the room": (
        {"shared_words": 3}, "room.index(2 + ", "room.index(4 + ", InternalError,
    ),
    "a segment's sums over another's": (
        {"segments": 2}, ".slice(1 * THREADS", ".slice(0 * THREADS", InternalError,
    ),
    "fp16: halves exchanged": (
        {"value": "fp16"}, "half_bits(a) | (half_bits(b) << 16)",
        "half_bits(b) | (half_bits(a) << 16)", None,
    ),
    "fp32: columns exchanged": ({"value": "fp32"}, "real((picked >> 32)", "real((picked)", None),
    "counter: relaxed arrival": ({"sync": "counter"}, 'sem="release"', 'sem="relaxed"', None),
    "counter: relaxed wait": ({"sync": "counter"}, 'sem="acquire"', 'sem="relaxed"', None),
    "counter: no wait": ({"sync": "counter"}, "while late < 0:", "while late < -99:", None),
    "counter: one buffer": ({"sync": "counter"}, "((step + 1) & 1)", "(step & 1)", None),
    "counter: no arrival": (
        {"sync": "counter"}, "    arrive(counter_ptr)\n", "    pass\n", DeadlockError,
    ),
    "counter: counts from 0": ({"sync": "counter", "launches": 2}, "arrived + ", "", None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    options, old, new, error = MUTANTS[name]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    if error is not None:
        with pytest.raises(error):
            run("rnn_tanh", tmp_path, edit=edit, steps=5, **options)
    else:
        assert max(run("rnn_tanh", tmp_path, edit=edit, steps=5, **options).values()) > 0.1


# --- launch after launch ---


def test_a_launch_can_be_replayed(tmp_path: Path) -> None:
    """As a CUDA graph does: the same arguments, what counts on lies in tensors."""
    seen = []

    def start(spec: FastSpec, blocks: int, arguments: Mapping[str, Any]) -> None:
        seen.append({k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in arguments.items()})
        arguments["counter_ptr"].add_(3 * blocks)  # as its blocks would

    fast = Fast(
        torch.eye(8), "rnn_tanh", 1, launch=start, programs=2, shape=Shape(warps=2), sync="counter"
    )
    given = torch.zeros(3, 1, 8), None, torch.zeros(1, 8), None
    counting = ("exchange_ptr", "clock_ptr", "counter_ptr", "error_ptr", "word_ptr", "steps")
    for _ in range(3):
        fast.forward(*given)
    assert all(seen[0][k] == each[k] for each in seen for k in counting)
    assert not [k for k, v in seen[0].items() if seen[0][k] != v and not k.endswith("ptr")]
    assert fast.exchanges[0].clock.tolist() == [1 + 3 * 4, 3 * 3 * 2]
    assert int(fast.exchanges[0].counter) == 3 * 3 * 2


@pytest.mark.parametrize(("sync", "steps"), [("lamport", 2), ("counter", 5)])
def test_a_clock_that_stands_still_is_caught(
    sync: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(run("rnn_tanh", tmp_path, steps=steps, launches=2, sync=sync).values()) < LIMIT
    monkeypatch.setattr(Exchange, "advance", lambda self, steps: None)
    assert max(run("rnn_tanh", tmp_path, steps=steps, launches=2, sync=sync).values()) > 0.1


@pytest.mark.parametrize("sync", ["lamport", "counter"])
def test_clocks_wrap_around(sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Exchange.__init__

    def late(self: Exchange, spec: FastSpec, device: torch.device) -> None:
        made(self, spec, device)
        self.clock[:] = torch.tensor([2**31 - 3, 2**31 - 2 * spec.programs])
        self.counter[:] = 2**31 - 2 * spec.programs

    monkeypatch.setattr(Exchange, "__init__", late)
    assert max(run("rnn_tanh", tmp_path, steps=3, launches=3, sync=sync).values()) < LIMIT


def test_chunks_of_the_states() -> None:
    def chunks(hidden: int, warps: int = 8) -> tuple[tuple[int, int], ...]:
        return replace(SPEC, hidden=hidden, warps=warps).chunks

    assert chunks(2304) == ((0, 2048), (2048, 256))
    assert chunks(33) == ((0, 64),)
    assert chunks(4096) == ((0, 2048), (2048, 2048))
    assert chunks(4096, 16) == ((0, 4096),)
    for hidden in range(1, 6000, 37):
        found = chunks(hidden)
        assert len(found) <= 5
        assert found[0][0] == 0
        assert all(a + n == b for (a, n), (b, _) in pairwise(found))
        assert hidden <= sum(n for _, n in found) <= 1.25 * hidden + 64


def test_what_one_launch_cannot_take() -> None:
    with pytest.raises(CapacityError, match="1 to 8"):
        replace(SPEC, batch=9)
    with pytest.raises(CapacityError, match="64 slots in a row"):
        replace(SPEC, slots=64)


def test_the_file_says_what_it_is_for() -> None:
    head = emit_fast(SPEC).splitlines()[2]
    assert head.startswith("cell_name=rnn_tanh, part=forward, hidden=192, batch=4, programs=8")
    assert [fact.split("=")[0] for fact in head.split(", ")] == [f.name for f in fields(SPEC)]
