"""Checkpoints: across tp, back into the unmodified model, killed, cut short."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import graphpar
from graphpar.errors import CheckpointError
from tests import zoo
from tests.distributed.harness import run_processes

NAMES = ("gpt2", "odd")
LR = 1e-2


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, kwargs = zoo.build(name, layers=1, dropout=0.0)
    return model.double(), kwargs


def steps(model: nn.Module, optimizer: Any, kwargs: dict[str, Any], count: int) -> float:
    loss = torch.zeros(())
    for _ in range(count):
        loss = zoo.loss_of(model(**kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def trained(rank: int, group: str, folder: str) -> list[float]:
    """Load what is there (if anything), take steps, save under this tp; the losses."""
    warnings.simplefilter("ignore")
    tp, losses = dist.get_world_size(), []
    for name in NAMES:
        model, kwargs = build(name)
        parallel = graphpar.transform(model, (), kwargs, tp=tp, sp=True)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=LR)
        source = Path(folder, name, str(tp // 2))
        if source.exists():
            before = [p.to_local().data_ptr() for p in parallel.parameters()]  # type: ignore[attr-defined]
            graphpar.load_checkpoint(source, parallel, optimizer)
            after = [p.to_local().data_ptr() for p in parallel.parameters()]  # type: ignore[attr-defined]
            assert before == after, "parameters are read in place"
        losses.append(steps(parallel, optimizer, kwargs, 2))
        graphpar.save_checkpoint(Path(folder, name, str(tp)), parallel, optimizer)
        plain = Path(folder, name, f"plain-{tp}")
        save({"model": parallel.state_dict()}, checkpoint_id=plain)
    return losses


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """Two steps at each of tp 1, 2 and 4, each from the one before; the losses of the ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in NAMES:
        model, kwargs = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        steps(model, optimizer, kwargs, 2)
        graphpar.save_checkpoint(folder / name / "1", model, optimizer)
    losses = [run_processes(world, trained, str(folder), timeout=300)[0] for world in (2, 4)]
    return folder, losses


def test_training_goes_on_as_on_one_device(checkpoints: tuple[Path, list[list[float]]]) -> None:
    folder, losses = checkpoints
    for position, name in enumerate(NAMES):
        model, kwargs = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        steps(model, optimizer, kwargs, 2)
        for found in losses:
            assert found[position] == pytest.approx(steps(model, optimizer, kwargs, 2), rel=1e-5)
        other, _ = build(name)
        own = torch.optim.AdamW(other.parameters(), lr=1.0)
        graphpar.load_checkpoint(folder / name / "4", other, own)
        assert list(other.state_dict()) == list(model.state_dict())
        for key, value in model.state_dict().items():
            assert other.state_dict()[key].dtype == value.dtype
            torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-3, atol=1e-4)
        assert own.param_groups[0]["lr"] == LR
        assert steps(other, own, kwargs, 1) == pytest.approx(
            steps(model, optimizer, kwargs, 1), rel=1e-5
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_takes_the_state_dict(checkpoints: tuple[Path, list[list[float]]]) -> None:
    folder, _ = checkpoints
    for name in NAMES:
        model, _ = build(name)
        whole = {"model": model.state_dict()}
        load(whole, checkpoint_id=folder / name / "plain-4", no_dist=True)
        other, _ = build(name)
        graphpar.load_checkpoint(folder / name / "4", other)
        for key, value in other.state_dict().items():
            assert torch.equal(whole["model"][key], value), key


def test_a_file_that_is_cut_short_names_the_tensor(
    checkpoints: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    folder, _ = checkpoints
    shutil.copytree(folder / "gpt2" / "2", tmp_path / "cut")
    file = sorted((tmp_path / "cut").glob("*.distcp"))[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    model, _ = build("gpt2")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"cut short: it lacks (model|optimizer)\."):
        graphpar.load_checkpoint(tmp_path / "cut", model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_another_model_names_the_tensor(checkpoints: tuple[Path, list[list[float]]]) -> None:
    folder, _ = checkpoints
    model, _ = zoo.build("nanogpt", layers=1)
    with pytest.raises(CheckpointError, match=r"has no tensor model\.tokens\.weight"):
        graphpar.load_checkpoint(folder / "gpt2" / "2", model)
    model, _ = build("gpt2")
    model.lm_head = nn.Linear(zoo.WIDTH, 8, bias=False)
    with pytest.raises(
        CheckpointError, match=r"model\.lm_head\.weight is \[96, 64\].*not \[8, 64\]"
    ):
        graphpar.load_checkpoint(folder / "gpt2" / "2", model)


def test_a_save_that_was_killed_leaves_the_older_one(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    graphpar.save_checkpoint(tmp_path / "c", model)
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.get_parameter("lm_head.weight").zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", _killed)
        with pytest.raises(BaseException, match="killed"):
            graphpar.save_checkpoint(tmp_path / "c", model)
        with pytest.raises(BaseException, match="killed"):
            graphpar.save_checkpoint(tmp_path / "new", model)
    graphpar.load_checkpoint(tmp_path / "c", model)
    assert torch.equal(model.state_dict()["lm_head.weight"], kept["lm_head.weight"])
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        graphpar.load_checkpoint(tmp_path / "new", model)
    graphpar.save_checkpoint(tmp_path / "new", model)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["c", "c.partial", "new"]


class Counting(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(2, 2), 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def test_between_two_renames_and_extra_state(tmp_path: Path) -> None:
    model, other = Counting(), Counting()
    model.steps = 7
    graphpar.save_checkpoint(tmp_path / "c", model)
    (tmp_path / "c").rename(tmp_path / "c.previous")
    graphpar.load_checkpoint(tmp_path / "c", other)
    assert other.steps == 7
    assert torch.equal(other.layer.weight, model.layer.weight)
    graphpar.save_checkpoint(tmp_path / "c", model)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _killed(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt("killed")
