"""With the rest of PyTorch: FSDP2, replicas, accumulation, autocast, torch.compile."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphpar
from graphpar.errors import CheckpointError
from tests import zoo
from tests.distributed.harness import run_processes
from tests.zoo.precise import float64_inside

Call = dict[str, Any]


def build(name: str) -> tuple[nn.Module, Call]:
    model, kwargs = zoo.build(name, dropout=0.0)
    return model.double(), kwargs


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_gradients(found: nn.Module, wanted: nn.Module) -> None:
    gradients = dict(found.named_parameters())
    for key, parameter in wanted.named_parameters():
        if parameter.grad is not None:
            grad = gradients[key].grad
            assert grad is not None, key
            torch.testing.assert_close(whole(grad), parameter.grad, rtol=1e-12, atol=1e-12)


def assert_state(found: graphpar.ParallelModule, wanted: nn.Module, tolerance: float) -> None:
    full = found.full_state_dict()
    assert list(full) == list(wanted.state_dict())
    for key, value in wanted.state_dict().items():
        torch.testing.assert_close(full[key], value, rtol=tolerance, atol=tolerance)


def rows(kwargs: Call, at: int) -> Call:
    """One row of the batch."""
    return {k: v[at : at + 1] if isinstance(v, Tensor) else v for k, v in kwargs.items()}


# --- two data-parallel groups of two ranks ------------------------------------------------------


def data_parallel(rank: int, group: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with float64_inside():
        _replicas("llama", mesh)
        for name in ("gpt2", "odd"):
            _fully_sharded(name, mesh, Path(folder, name))


def _mean_loss(model: nn.Module, kwargs: Call) -> Tensor:
    return (zoo.loss_of(model(**rows(kwargs, 0))) + zoo.loss_of(model(**rows(kwargs, 1)))) / 2


def _replicas(name: str, mesh: DeviceMesh) -> None:
    """Gradients averaged over replicas by hand, as DDP does."""
    model, kwargs = build(name)
    twin = copy.deepcopy(model)
    own = rows(kwargs, mesh["dp"].get_local_rank())
    parallel = graphpar.transform(model, (), own, tp=2, sp=True, mesh=mesh)
    zoo.loss_of(parallel(**own)).backward()
    for parameter in parallel.parameters():
        assert isinstance(parameter.grad, DTensor)
        dist.all_reduce(parameter.grad.to_local(), group=mesh["dp"].get_group())
        parameter.grad.to_local().div_(2)
    _mean_loss(twin, kwargs).backward()
    assert_gradients(parallel, twin)


def _fully_sharded(name: str, mesh: DeviceMesh, folder: Path) -> None:
    """FSDP2 on each block and on the root: steps, the gradient norm, checkpoints."""
    model, kwargs = build(name)
    twin = copy.deepcopy(model)
    own = rows(kwargs, mesh["dp"].get_local_rank())
    parallel = _wrapped(model, own, mesh)
    assert_state(parallel, twin, 0.0)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (parallel, twin)]
    for _ in range(2):
        zoo.loss_of(parallel(**own)).backward()
        _mean_loss(twin, kwargs).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m, _ in pairs]
        torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-12, atol=1e-12)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    assert_state(parallel, twin, 1e-6)
    graphpar.save_checkpoint(folder, parallel, pairs[0][1])
    other = _wrapped(build(name)[0], own, mesh)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    graphpar.load_checkpoint(folder, other, optimizer)
    assert_state(other, twin, 1e-6)
    saved = parallel.full_state_dict()
    assert all(torch.equal(value, saved[key]) for key, value in other.full_state_dict().items())
    alone, _ = build(name)
    graphpar.load_checkpoint(folder, graphpar.transform(alone, (), own, tp=2, mesh=mesh))
    with pytest.raises(CheckpointError, match="before fully_shard"):
        graphpar.load_safetensors(other, folder)
    zoo.loss_of(other(**own)).backward()
    optimizer.step()


def _wrapped(model: nn.Module, call: Call, mesh: DeviceMesh) -> graphpar.ParallelModule:
    parallel = graphpar.transform(model, (), call, tp=2, sp=True, mesh=mesh)
    for path in parallel.program.calls:
        fully_shard(parallel.get_submodule(path), mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    return parallel


def test_data_parallel_groups(tmp_path: Path) -> None:
    run_processes(4, data_parallel, str(tmp_path), timeout=300)


# --- two ranks ----------------------------------------------------------------------------------


def with_the_rest(rank: int, group: str, backends: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    with float64_inside():
        model, kwargs = build("llama")
        twin = copy.deepcopy(model)
        parallel = graphpar.transform(model, (), kwargs, tp=2, sp=True)
        for _ in range(3):  # accumulated
            zoo.loss_of(parallel(**kwargs)).backward()
            zoo.loss_of(twin(**kwargs)).backward()
        assert_gradients(parallel, twin)
        for backend in backends:
            torch.compiler.reset()
            parallel.zero_grad()
            twin.zero_grad()
            zoo.loss_of(
                torch.compile(parallel, backend=backend, fullgraph=True)(**kwargs)
            ).backward()
            zoo.loss_of(twin(**kwargs)).backward()
            assert_gradients(parallel, twin)
    model, kwargs = zoo.build("gpt2", dropout=0.0)
    twin = copy.deepcopy(model)
    parallel = graphpar.transform(model, (), kwargs, tp=2, sp=True)
    pairs = [(m, torch.optim.AdamW(m.parameters(), fused=True)) for m in (parallel, twin)]
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (parallel, twin)]
    losses = []
    for module, optimizer in pairs:
        with torch.autocast("cpu", torch.bfloat16):
            loss = zoo.loss_of(module(**kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for average, (module, _) in zip(averages, pairs, strict=True):
        average.update_parameters(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)
        average.update_parameters(module)
    ours, theirs = (average(**kwargs).logits for average in averages)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert not torch.equal(ours, parallel(**kwargs).logits)


def test_accumulation_compile_autocast_and_fused_optimizers() -> None:
    # Inductor the second time from its cache on disk.
    compilers = ("aot_eager", *(("inductor",) * 2 if shutil.which("g++") else ()))
    run_processes(2, with_the_rest, compilers, timeout=300)
