"""Checkpoints that any tp, and the unmodified model, can load.

They are PyTorch's own (``torch.distributed.checkpoint``, DCP): whole tensors under the original
names, written and read in parts. A packed parameter is several pieces of the whole tensor.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphpar.errors import CheckpointError
from graphpar.parallel_module import ParallelModule
from graphpar.state import in_pieces, packed_types


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Write the model's state, and the optimizer's, to the folder ``path``; all ranks call it.

    The folder appears, or takes the place of an older one, when all is written. After a save that
    was killed the older one is there, under its name or, between two renames, with ``.previous``
    behind it, where :func:`load_checkpoint` looks too.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    if _first():
        shutil.rmtree(partial, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    _barrier()
    with _one_process_is_fine():
        save(_state(model, optimizer), checkpoint_id=partial)
    _barrier()
    if _first():
        previous = _previous(path)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        partial.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    _barrier()


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Read into ``model`` and ``optimizer`` what any tp, or the unmodified model, has saved.

    Raises:
        CheckpointError: no complete checkpoint is there, a tensor is missing, has another shape or
            is cut short; the message names it. Nothing has been changed then.
    """
    path = Path(path)
    if not path.exists() and _previous(path).exists():
        path = _previous(path)
    _check(path, {"model": model.state_dict()})
    if isinstance(model, ParallelModule):
        model.allocate()
    state = _state(model, optimizer)
    if optimizer is not None:
        _check(path, {"optimizer": state["optimizer"]})
    with _one_process_is_fine():
        load(state, checkpoint_id=path)
    if optimizer is not None:
        _set_optimizer(model, optimizer, state["optimizer"])
    _load_plain(model, state["model"])


def _load_plain(model: nn.Module, values: Mapping[str, Any]) -> None:
    """What DCP does not read in place: extra state."""
    plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    if plain:
        model.load_state_dict(plain, strict=False)


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        own: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        state["optimizer"] = own | {"state": _in_pieces(model, own["state"])}
    return state


def _in_pieces(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameter names in a form that DCP saves and loads; the memory is
    shared."""
    found = {name: dict(values) for name, values in state.items()}
    if isinstance(model, ParallelModule):
        for name, kind in packed_types(model.program.state.values()).items():
            for key, value in found.get(name, {}).items():
                if isinstance(value, DTensor) and value.dim():
                    found[name][key] = in_pieces(value, kind)
    return found


def _set_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """What was read: into the optimizer's own tensors where it was read in pieces."""
    own: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    own = own["state"]
    if isinstance(model, ParallelModule):
        for name in packed_types(model.program.state.values()):
            for key, value in state["state"].get(name, {}).items():
                if isinstance(value, DTensor) and value.dim():
                    state["state"][name][key] = own[name][key]
    set_optimizer_state_dict(model, optimizer, state)


def _check(path: Path, state: Mapping[str, Any]) -> None:
    """That the checkpoint holds every tensor of ``state``, in its shape, whole."""
    try:
        metadata: Metadata = FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} holds no complete checkpoint: {error}") from error
    ends: dict[str, int] = {}
    for name, value in _flat(state).items():
        if not isinstance(value, Tensor):
            continue
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path} has no tensor {name}")
        if tuple(entry.size) != tuple(value.shape):
            raise CheckpointError(
                f"{name} is {list(entry.size)} in {path}, not {list(value.shape)}"
            )
    for index, info in (metadata.storage_data or {}).items():
        file = path / info.relative_path
        if str(file) not in ends:
            ends[str(file)] = file.stat().st_size if file.exists() else -1
        if ends[str(file)] < info.offset + info.length:
            raise CheckpointError(f"{file} is missing or cut short: it lacks {index.fqn}")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """As DCP names the leaves of nested dicts and lists: keys joined by dots."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, (Mapping, list, tuple)) and value:
            flat |= _flat(value, name)
        else:
            flat[name] = value
    return flat


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
