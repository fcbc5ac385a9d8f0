"""Launches of the fast kernels on GPUs, as far as that can be said without one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.codegen.sparse_rnn import decide as decide_module
from graphpar.codegen.sparse_rnn import decide_gpu
from graphpar.codegen.sparse_rnn.decide import Decision, decide
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import FastLauncher, described
from graphpar.codegen.sparse_rnn.plan import Plan
from graphpar.codegen.sparse_rnn.spec import PartName
from graphpar.errors import CapacityError, UnsupportedError
from graphpar.testing import rewrite

SIZES: dict[str, Any] = {"batch": 1, "device": DEVICES["sm_90"], "value": "bf16"}


def test_what_the_compiler_or_the_driver_says_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the recurrence goes to the library's products; a kernel is made once per device."""
    launcher = FastLauncher()
    spec = FastSpec.of(plan_of(torch.eye(16), "rnn_tanh", "forward", **SIZES))
    made: list[torch.device] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda **arguments: made.append(arguments["exchange_ptr"].device)

    def ready(self: FastLauncher, spec: FastSpec, programs: int, arguments: Any) -> Any:
        if arguments["steps"] < 0:
            raise RuntimeError("too many resources requested for launch")
        made.append(torch.device("meta"))
        return Kernel()

    monkeypatch.setattr(FastLauncher, "_ready", ready)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    given = {
        n: {"exchange_ptr": SimpleNamespace(device=torch.device("cuda", n)), "steps": 1}
        for n in (0, 1)
    }
    with pytest.raises(UnsupportedError, match="refuses the kernel: too many resources requested"):
        launcher(spec, 4, {**given[0], "steps": -1})
    for n in (0, 1, 0):
        launcher(spec, 4, given[n])
    assert [d.type for d in made] == ["meta", "cuda", "meta", "cuda", "cuda"]


def test_a_gpu_is_planned_as_the_known_one_that_is_nearest() -> None:
    sizes = {"multi_processor_count": 142, "regs_per_multiprocessor": 65536}
    sizes |= {"shared_memory_per_block_optin": 101376}
    found = described(SimpleNamespace(name="L40S", major=8, minor=9, **sizes))
    assert (found.name, found.arch) == ("L40S", "sm_80")
    assert (found.multiprocessors, found.shared_bytes) == (142, 101376)
    newer = described(SimpleNamespace(name="later", major=12, minor=0, **sizes))
    assert newer.arch == "sm_100"


# --- decisions ---

CUDA = torch.device("cuda", 0)


def decided(
    monkeypatch: pytest.MonkeyPatch,
    weight: Tensor,
    mode: bool | str = "auto",
    multiprocessors: int = 132,
    **options: Any,
) -> Decision:
    """For an LSTM on an H200 that does not exist here."""
    planned = replace(DEVICES["sm_90"], multiprocessors=multiprocessors)
    monkeypatch.setattr(decide_gpu, "planned_device", lambda device: planned)
    given: dict[str, Any] = {"steps": 9, "batch": 4, "dtype": torch.bfloat16} | options
    return decide("lstm", weight, mode=mode, device=CUDA, **given)


def sparse(hidden: int, density: float) -> Tensor:
    torch.manual_seed(0)
    shape = 4 * hidden, hidden
    return torch.randn(shape) * (torch.rand(shape) < density)


def test_a_gpu_decides_by_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sparse(1536, 0.05)
    asked = decided(monkeypatch, weight, True)
    assert asked.lowered
    assert asked.speedup is not None
    assert asked.reason.startswith("sparse_rnn=True (modelled ")
    assert asked.speedup > 1.1
    careful = decided(monkeypatch, weight)
    assert not careful.lowered
    assert careful.reason.startswith("its kernels have run on no GPU yet, sparse_rnn=True runs")
    assert careful.speedup == asked.speedup
    monkeypatch.setattr(decide_module, "RUN_ON_GPUS", True)
    assert decided(monkeypatch, weight).reason.startswith("faster: modelled ")
    assert decided(monkeypatch, sparse(64, 0.9)).reason.startswith("not faster: modelled ")


def test_a_gpu_decides_by_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_module, "RUN_ON_GPUS", True)
    weight = sparse(1536, 0.05)
    both, forward = (decided(monkeypatch, weight, trains=trains) for trains in (True, False))
    assert both.lowered
    assert " us a step and back, dense " in both.reason
    assert " us a step, dense " in forward.reason
    assert both.speedup != forward.speedup

    def refuse(weight: Tensor, cell: str, part: PartName, **options: Any) -> Plan:
        if part == "backward":
            raise CapacityError("does not fit on H200: too wide")
        return plan_of(weight, cell, part, **options)

    monkeypatch.setattr(decide_gpu, "plan_of", refuse)
    assert decided(monkeypatch, weight, trains=False) == forward
    assert decided(monkeypatch, weight).reason == "its backward does not fit on H200: too wide"
    asked = decided(monkeypatch, weight, True)
    assert asked.lowered
    assert "; backward is the library's: it does not fit on H200: too wide" in asked.reason


def test_what_a_gpu_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = sparse(1280, 0.9), sparse(64, 0.1)
    found = decided(monkeypatch, large, multiprocessors=16)
    assert found.reason.startswith("does not fit on H200: ")
    with pytest.raises(CapacityError, match=r"does not fit on H200: .* would fit"):
        decided(monkeypatch, large, True, multiprocessors=16)
    wide = decided(monkeypatch, small, True, dtype=torch.float64)
    assert wide.lowered
    assert wide.reason == (
        "sparse_rnn=True, by the library's products: a kernel takes torch.bfloat16, "
        "torch.float16, torch.float32, not torch.float64"
    )
    projected = decided(monkeypatch, small[:, :32])
    assert str(projected) == "dense: a kernel has no projections"

    def refused(device: torch.device) -> Any:
        raise UnsupportedError("compute capability 7.5: the kernels need 8.0 or newer")

    monkeypatch.setattr(decide_gpu, "planned_device", refused)
    given: dict[str, Any] = {"steps": 9, "batch": 4, "dtype": torch.float16, "device": CUDA}
    assert "7.5" in decide("lstm", small, mode="auto", **given).reason
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        decide("lstm", small, mode=True, **given)


@pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
def test_an_op_that_was_asked_for_raises_on_a_gpu() -> None:
    """Where no kernel fits or runs, in place of a warning; the meta device stands for a GPU."""
    op = torch.ops.graphpar_rnn.sparse_rnn.default
    for device, mode, strict in (("meta", True, (True,)), ("cpu", True, ())):
        model, x = nn.GRU(4, 4, device=device), torch.randn(3, 2, 4, device=device)
        program = rewrite(model, (x,), tp=2, sparse_rnn=mode)
        (node,) = [n for _, graph in program.graphs() for n in graph.nodes if n.target is op]
        assert node.args[8:] == strict


# --- the benchmark ---

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_sparse_rnn.py"


def test_the_benchmark_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK)])
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    assert capsys.readouterr().out.strip() == "no GPU here: nothing to measure"


@pytest.mark.long
def test_the_benchmark_in_the_interpreter() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--dry"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Interpreted: the times say nothing." in done.stdout
    assert "op: weights that change, and grow" in done.stdout
