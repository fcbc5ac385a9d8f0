"""safetensors files: one, several, damaged; each rank reads its slices, also from nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpar
from graphpar.errors import CheckpointError, GraphparError
from tests import zoo
from tests.distributed.harness import run_processes
from tests.zoo.precise import float64_inside

NAMES = ("gpt2", "llama", "odd")


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, kwargs = zoo.build(name, layers=1, dropout=0.0)
    return model.double(), kwargs


def without_values(model: nn.Module) -> nn.Module:
    """The model with its parameters on the meta device; its buffers keep their values."""
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is not None:
                made = memo.setdefault(id(value), nn.Parameter(value.detach().to("meta")))
                module._parameters[key] = made
    return model


def write(model: nn.Module, folder: Path) -> None:
    """One file, and several with an index; tied tensors once, as safetensors wants them."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            state[key] = value.detach().clone()
    save_file(state, folder / "model.safetensors")
    index: dict[str, str] = {}
    (folder / "several").mkdir()
    for number in range(3):
        keys = list(state)[number::3]
        save_file({k: state[k] for k in keys}, folder / "several" / f"{number}.safetensors")
        index |= dict.fromkeys(keys, f"{number}.safetensors")
    text = json.dumps({"weight_map": index})
    (folder / "several" / "model.safetensors.index.json").write_text(text)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for name in NAMES:
        model, _ = build(name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        (folder / name).mkdir()
        write(model, folder / name)
        torch.save(model.state_dict(), folder / name / "state.pt")
    return folder


def loaded(rank: int, group: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    for name in ("gpt2", "odd"):
        model, kwargs = build(name)
        model.load_state_dict(torch.load(Path(folder, name, "state.pt")))
        with float64_inside():
            expected = zoo.loss_of(model(**kwargs))
            for source in (Path(folder, name), Path(folder, name, "several")):
                empty = without_values(build(name)[0])
                parallel = graphpar.transform(empty, (), kwargs, tp=dist.get_world_size(), sp=True)
                with pytest.raises(GraphparError, match="call load_safetensors"):
                    parallel(**kwargs)
                graphpar.load_safetensors(parallel, source)
                full = parallel.full_state_dict()
                assert list(full) == list(model.state_dict())
                for key, value in model.state_dict().items():
                    assert torch.equal(full[key], value), key
                optimizer = torch.optim.AdamW(parallel.parameters())
                found = zoo.loss_of(parallel(**kwargs))
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
                found.backward()
                optimizer.step()
            again = graphpar.transform(build(name)[0], (), kwargs, tp=dist.get_world_size())
            graphpar.load_safetensors(again, Path(folder, name, "model.safetensors"))
            for key, value in model.state_dict().items():
                assert torch.equal(again.full_state_dict()[key], value), key


@pytest.mark.parametrize("world", [2])
def test_ranks_load_their_slices(files: Path, world: int) -> None:
    run_processes(world, loaded, str(files), timeout=240)


def parallel_of(name: str) -> graphpar.ParallelModule:
    model, kwargs = build(name)
    return graphpar.transform(model, (), kwargs, tp=1)


def test_one_process(files: Path) -> None:
    expected = torch.load(files / "llama" / "state.pt")
    parallel = parallel_of("llama")
    graphpar.load_safetensors(parallel, files / "llama")
    assert all(torch.equal(v, expected[k]) for k, v in parallel.state_dict().items())


def test_errors_name_the_tensor(files: Path, tmp_path: Path) -> None:
    parallel = parallel_of("llama")
    with pytest.raises(CheckpointError, match=r"have no tensor model\.embed_tokens\.weight"):
        graphpar.load_safetensors(parallel, files / "gpt2")
    with pytest.raises(CheckpointError, match="does not exist"):
        graphpar.load_safetensors(parallel, tmp_path)
    whole = (files / "llama" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        graphpar.load_safetensors(parallel, tmp_path)
    state = dict(torch.load(files / "llama" / "state.pt"))
    state["lm_head.weight"] = torch.zeros(3, 3)
    save_file(state, tmp_path / "other.safetensors")
    before = {k: v.clone() for k, v in parallel.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[3, 3\].*not \[96, 64\]"):
        graphpar.load_safetensors(parallel, tmp_path / "other.safetensors")
    assert all(torch.equal(v, before[k]) for k, v in parallel.state_dict().items())


def test_buffers_without_values_are_named(files: Path) -> None:
    model, kwargs = build("llama")
    parallel = graphpar.transform(model.to("meta"), (), kwargs, tp=1)
    with pytest.raises(CheckpointError, match=r"rotary_emb\.inv_freq.*give them values"):
        graphpar.load_safetensors(parallel, files / "llama")
