"""Rewritten models on real ranks: threads of one process, and gloo processes."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphpar
from graphpar.container import mirror, place
from graphpar.errors import MeshError, RankMismatchError
from graphpar.interpret import model_state
from graphpar.ops.agree import meet
from graphpar.program import Program
from graphpar.runtime import compile_program
from graphpar.state import local_part
from graphpar.testing import rewrite
from tests import zoo
from tests.distributed.harness import run_processes, run_threads
from tests.zoo.precise import float64_inside


def _model(name: str, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    model, kwargs = zoo.build(name, dropout=dropout)
    return model.double(), kwargs


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(rank: int, group: str, cases: tuple[tuple[str, bool], ...]) -> list[dict[str, float]]:
    """Two steps of AdamW beside the unmodified model; the largest differences, per case."""
    warnings.simplefilter("ignore")
    with float64_inside():
        return [_train(name, sp) for name, sp in cases]


def _train(name: str, sp: bool) -> dict[str, float]:
    model, kwargs = _model(name, dropout=0.1)
    twin = copy.deepcopy(model)
    parallel = graphpar.transform(model, (), kwargs, tp=dist.get_world_size(), sp=sp, rng="exact")
    assert list(parallel.state_dict()) == list(twin.state_dict())
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0}
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in (parallel, twin)]
    for seed in range(2):
        losses, norms = [], []
        for module, _ in pairs:
            torch.manual_seed(seed)
            loss = zoo.loss_of(module(**kwargs))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            losses.append(loss.item())
            norms.append(_whole(norm).item())
        grads = {n: _whole(p.grad) for n, p in parallel.named_parameters() if p.grad is not None}
        for key, parameter in twin.named_parameters():
            if parameter.grad is not None:
                difference = (grads[key] - parameter.grad).abs().max().item()
                worst["gradient"] = max(worst["gradient"], difference)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        worst["loss"] = max(worst["loss"], abs(losses[0] - losses[1]))
        worst["norm"] = max(worst["norm"], abs(norms[0] - norms[1]))
    full = parallel.full_state_dict()
    for key, value in twin.state_dict().items():
        worst["parameter"] = max(worst["parameter"], (full[key] - value).abs().max().item())
        assert torch.equal(_whole(parallel.state_dict()[key]), full[key]), key
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())
    _other_calls(parallel, twin, kwargs)
    parallel.load_state_dict(model.state_dict())
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in parallel.full_state_dict().items())
    return worst


def _other_calls(parallel: nn.Module, twin: nn.Module, kwargs: dict[str, Any]) -> None:
    """In eval mode, and with half the batch: new traces, the same parameters."""
    half = {k: v[:1] if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    for call in (kwargs, half):
        found = zoo.loss_of(parallel.eval()(**call))
        torch.testing.assert_close(found, zoo.loss_of(twin.eval()(**call)), rtol=1e-6, atol=1e-6)


TWO = (("gpt2", True), ("nanogpt", False), ("odd", True))
FOUR = (("odd", False),)


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)])
def test_training_on_processes(world: int, cases: tuple[tuple[str, bool], ...]) -> None:
    """Also case C23: the gradient norm is the one-device norm, and clipping scales all."""
    for ranks in run_processes(world, train, cases, timeout=400):
        for (name, _), worst in zip(cases, ranks, strict=True):
            assert worst["loss"] < 1e-12, (name, worst)
            assert worst["norm"] < 1e-11, (name, worst)
            assert worst["gradient"] < 1e-12, (name, worst)
            # Adam divides tiny gradients by their own size, so their rounding shows.
            assert worst["parameter"] < 1e-8, (name, worst)


# --- the same programs on threads ---------------------------------------------------------------


@functools.cache
def _rewritten(ranks: int, sp: bool) -> tuple[nn.Module, dict[str, Any], Program]:
    model, kwargs = _model("nanogpt", dropout=0.0)
    zoo.loss_of(model(**kwargs)).backward()
    return model, kwargs, rewrite(model, (), kwargs, tp=ranks, sp=sp)


def forward_backward(rank: int, group: str, sp: bool) -> float:
    """One step on local tensors; the largest difference of a gradient."""
    ranks = dist.get_world_size()
    model, kwargs, program = _rewritten(ranks, sp)
    tree = mirror(model)
    parts: dict[str, Tensor] = {}
    for key, value in model_state(model).items():
        state = program.state[key]
        part = local_part(value, state.type, rank, ranks)
        parts[key] = nn.Parameter(part) if state.kind == "parameter" else part
        for alias in state.names:
            place(tree, alias, parts[key])
    leaves = [v for v in kwargs.values() if isinstance(v, Tensor)]
    outputs = compile_program(program, group, rank)(tree, *leaves)
    zoo.loss_of(outputs).backward()
    worst = 0.0
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted = local_part(parameter.grad, program.state[key].type, rank, ranks)
        found = parts[key].grad
        assert found is not None
        worst = max(worst, (found - wanted).abs().max().item())
    return worst


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_the_same_program_on_threads(world: int, sp: bool) -> None:
    _rewritten(world, sp)  # tracing is not for threads
    assert max(run_threads(world, forward_backward, sp)) < 1e-12


# --- errors -------------------------------------------------------------------------------------


def errors(rank: int, group: str) -> list[str]:
    """The messages of ranks with different models, and of too few processes."""
    found = []
    for width, tp in ((16 + 16 * rank, 2), (16, 4)):
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
        try:
            graphpar.transform(model, (torch.randn(2, 8),), tp=tp)(torch.randn(2, 8))
        except (RankMismatchError, MeshError) as error:
            found.append(str(error))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    parallel = graphpar.transform(model, (torch.randn(2, 8),), tp=2)
    torch.manual_seed(rank)
    try:
        parallel(torch.randn(2, 8))
    except RankMismatchError as error:
        found.append(str(error))
    return found


def alone(rank: int, group: str) -> str:
    """What a rank gets that does alone what all must do."""
    if rank == 0:
        with pytest.raises(RankMismatchError) as error:
            meet(group, "saving", timeout_s=1.0)
        dist.barrier()
        return str(error.value)
    dist.barrier()
    return ""


def test_a_collective_that_one_rank_calls_is_an_error() -> None:
    first, _ = run_processes(2, alone, timeout=60)
    assert first == "saving must be called by all 2 ranks: after 1 s rank 1 has not"


def test_errors_reach_all_ranks() -> None:
    for different, too_few, unequal in run_processes(2, errors, timeout=120):
        assert "program" in different
        assert "random state" in unequal
        assert "tp=4 needs 4 processes, not 2" in too_few
