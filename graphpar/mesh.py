"""mesh: find the processes that a tensor-parallel program runs on."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphpar.errors import InputError
from graphpar.program import MESH_DIM


def check_tp(tp: object) -> int:
    """``tp`` as a positive int, or :class:`InputError`."""
    if isinstance(tp, bool) or not isinstance(tp, int):
        raise InputError(f"tp must be an int, not {tp!r}")
    if tp < 1:
        raise InputError(f"tp must be at least 1, not {tp}")
    return tp


def default_device() -> torch.device:
    """The accelerator, if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def find_mesh(mesh: DeviceMesh | None, tp: int, device: torch.device) -> DeviceMesh | None:
    """A one-dimensional mesh of ``tp`` ranks, or ``None`` if there are too few processes.

    A given mesh is used by its dimension "tp", or as it is if it has one dimension. Else, where
    torch.distributed is initialised or torchrun started this process, all processes form
    groups of ``tp`` consecutive ranks.

    Raises:
        InputError: the mesh has no dimension "tp" or one of another size; the number of
            processes is no multiple of ``tp``.
    """
    if mesh is not None:
        return _of_mesh(mesh, tp)
    world = process_count()
    if world < tp or not (dist.is_initialized() or "WORLD_SIZE" in os.environ):
        return None
    if world % tp:
        raise InputError(f"{world} processes cannot form groups of tp={tp}")
    shape = (world // tp, tp)
    device = default_device() if device.type == "meta" else device
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", MESH_DIM))[MESH_DIM]


def process_count() -> int:
    """How many processes run together: of torch.distributed, or as torchrun says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _of_mesh(mesh: DeviceMesh, tp: int) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if MESH_DIM in names:
        found = mesh[MESH_DIM] if mesh.ndim > 1 else mesh
    elif mesh.ndim == 1 and not names:
        found = mesh
    else:
        raise InputError(f"the mesh has no dimension {MESH_DIM!r}; it has {', '.join(names)}")
    if found.size() != tp:
        raise InputError(f"the mesh's {MESH_DIM!r} dimension has {found.size()} ranks, not {tp}")
    return found
