"""Weights from safetensors files: each rank reads its own slices only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from graphpar.errors import CheckpointError
from graphpar.parallel_module import ParallelModule
from graphpar.types import Shard, Type, intervals

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_safetensors(
    model: ParallelModule, path: str | Path, *, device: torch.device | str | None = None
) -> None:
    """Read parameters and buffers by their original names.

    Each rank reads the parts that it holds. A model on the meta device gets memory on ``device``
    first (default: the accelerator if there is one, else the CPU).

    Args:
        path: a ``.safetensors`` file, the JSON index of several, or a folder that holds
            ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is missing or has another shape; the
            message names it. Shapes are compared before anything is read.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise CheckpointError("load the weights before fully_shard cuts them again")
    files = _files(Path(path))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    fleeting = {name for s in model.program.state.values() if not s.persistent for name in s.names}
    shapes = {name: list(s.spec.shape) for s in model.program.state.values() for name in s.names}
    kinds = {name: (s.type, s.names) for s in model.program.state.values() for name in s.names}
    wanted = {name: _found(name, kinds[name][1], files) for name in state if name not in fleeting}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, key in wanted.items():
            file = files[key]
            if file not in opened:
                opened[file] = stack.enter_context(_open(file, key))
            shape = list(_slice(opened[file], file, key).get_shape())
            if shape != shapes[name]:
                raise CheckpointError(f"{name} is {shape} in {file}, not {shapes[name]}")
        model.allocate(device)
        local = model.local_tensors()
        rank, ranks = model.place_in_mesh()
        for name, key in wanted.items():
            part = _slice(opened[files[key]], files[key], key)
            for target, source in _pieces(local[name], part, kinds[name][0], rank, ranks):
                with torch.no_grad():
                    target.copy_(source)


def _files(path: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else path / SINGLE
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".json":
        try:
            index: Mapping[str, str] = json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is no index of safetensors files: {error}") from error
        return {key: path.parent / file for key, file in index.items()}
    with _open(path, "anything") as file:
        return dict.fromkeys(file.keys(), path)


def _open(file: Path, key: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read for {key}: {error}") from error


def _slice(opened: Any, file: Path, key: str) -> Any:
    try:
        return opened.get_slice(key)
    except SafetensorError as error:
        raise CheckpointError(f"{file} does not hold {key}: {error}") from error


def _found(name: str, names: tuple[str, ...], files: Mapping[str, Path]) -> str:
    """The key of a tensor: files keep tied ones under one of their names."""
    for key in (name, *names):
        if key in files:
            return key
    raise CheckpointError(f"the files have no tensor {name}")


def _pieces(
    local: Tensor, part: Any, kind: Type, rank: int, ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the local tensor, and what the file has for them."""
    if not isinstance(kind, Shard) or ranks == 1:
        yield local, part[...] if local.dim() else part[()]
        return
    offset = 0
    for start, size in intervals(kind, rank, ranks):
        where = (*(slice(None) for _ in range(kind.dim)), slice(start, start + size))
        yield local.narrow(kind.dim, offset, size), part[where]
        offset += size
