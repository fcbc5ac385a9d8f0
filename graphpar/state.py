"""state: parameters as DTensors with the layouts of partition types.

DTensor knows equal parts of equal blocks. Where the blocks or the parts are not equal
(:func:`is_native`), the DTensor is a plain shard of what the ranks hold, laid end to end, with
zeros behind uneven parts: optimizers, norms and FSDP work on it as on any other. What people and
files see is the original: ``state_dict``, checkpoints and ``full_tensor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as ReplicatePlacement
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from graphpar.errors import InputError
from graphpar.ops import redistribute
from graphpar.program import MESH_DIM, State
from graphpar.types import I, Shard, Type, cut, intervals, join, local_shape, local_size


def placement_of(kind: Type) -> Placement:
    """The DTensor placement of a parameter; those of several equal blocks are strided shards."""
    if not isinstance(kind, Shard):
        return ReplicatePlacement()
    if len(kind.blocks) == 1 or not is_native(kind):
        return ShardPlacement(kind.dim)
    return _StridedShard(kind.dim, split_factor=len(kind.blocks))


def is_native(kind: Type) -> bool:
    """Whether DTensor has a placement for the type."""
    return not isinstance(kind, Shard) or (len(set(kind.blocks)) == 1 and not kind.units)


def is_plain(kind: Type) -> bool:
    """Whether the parts are even and of one block, so that a DTensor's own ``full_tensor`` gives
    the whole (of equal blocks torch 2.11's does not)."""
    return not isinstance(kind, Shard) or (len(kind.blocks) == 1 and not kind.units)


def local_part(whole: Tensor, kind: Type, rank: int, ranks: int) -> Tensor:
    """A contiguous copy of what ``rank`` holds of ``whole``, padded to what the first rank does."""
    part = cut(whole, kind, rank, ranks) if isinstance(kind, Shard) else whole
    part = part.detach()
    if not isinstance(kind, Shard) or not kind.units:
        return part.clone(memory_format=torch.contiguous_format)
    padded = whole.new_zeros(local_shape(whole.shape, kind, 0, ranks))
    unpadded(padded, kind, rank, ranks).copy_(part)
    return padded


def unpadded(part: Tensor, kind: Type, rank: int, ranks: int) -> Tensor:
    """What ``rank`` holds, as a view of its padded part."""
    if not isinstance(kind, Shard) or not kind.units:
        return part
    return part.narrow(kind.dim, 0, local_size(kind, rank, ranks))


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The tensor-parallel dimension of a mesh, which FSDP may have joined with others."""
    return mesh[MESH_DIM] if mesh.ndim > 1 else mesh


def in_pieces(value: DTensor, kind: Shard) -> DTensor:
    """A DTensor over the same memory that tells DCP which pieces of the whole it holds.

    FSDP may hold some rows of a rank's part only. The shape is the whole tensor's.
    """
    local = value.to_local().detach()
    mesh = tensor_mesh(value.device_mesh)
    held: Sequence[tuple[int, int]] = intervals(kind, mesh.get_local_rank(), mesh.size())
    first = _first_row(value, kind, mesh.size())
    offsets = [0] * local.dim()
    if kind.dim == 0:
        # A rank that holds padding alone has an empty piece at the end.
        held = _within(held, first, local.shape[0]) or [(sum(kind.blocks), 0)]
    else:
        offsets[0] = first
    sizes = [size for _, size in held]
    local = local.narrow(kind.dim, 0, sum(sizes))
    shards = list(local.split(sizes, kind.dim))
    places = [(*offsets[: kind.dim], start, *offsets[kind.dim + 1 :]) for start, _ in held]
    wrapper = LocalShardsWrapper(shards, places)
    shape = torch.Size((*value.shape[: kind.dim], sum(kind.blocks), *value.shape[kind.dim + 1 :]))
    made = _with_local(value, local, shape)
    for protocol in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        setattr(made._local_tensor, protocol, getattr(wrapper, protocol))
    return made if is_plain(kind) else with_full_tensor(made, kind)


def from_pieces(value: DTensor, like: DTensor) -> DTensor:
    """What :func:`in_pieces` made, in the form that ``like``, a parameter, has."""
    local = value.to_local()
    padded = local.new_zeros(like.to_local().shape)
    padded[tuple(map(slice, local.shape))] = local
    return _with_local(like, padded)


def with_full_tensor(value: DTensor, kind: Shard) -> DTensor:
    """Let ``value.full_tensor()`` give the whole tensor in the order of the original."""

    def full_tensor(*, grad_placements: object = None) -> Tensor:
        mesh = value.device_mesh
        part = unpadded(value.to_local(), kind, mesh.get_local_rank(), mesh.size())
        return redistribute(part, kind, I, mesh.get_group().group_name)

    if value.device_mesh.ndim == 1:
        value.full_tensor = full_tensor  # type: ignore[method-assign]
    return value


def _with_local(value: DTensor, local: Tensor, shape: torch.Size | None = None) -> DTensor:
    """A DTensor laid out like ``value``, of which this rank holds ``local``."""
    shape = value.shape if shape is None else shape
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _first_row(value: DTensor, kind: Shard, ranks: int) -> int:
    """Where FSDP's chunk begins among the rows of the rank's tensor-parallel part."""
    rows = value.shape[0] // ranks if kind.dim == 0 else value.shape[0]
    mesh = value.device_mesh
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        if name != MESH_DIM and not value.placements[index].is_replicate():
            chunk = -(-rows // mesh.size(index))
            return min(mesh.get_local_rank(index) * chunk, rows)
    return 0


def _within(held: Sequence[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """Of pieces laid end to end, those between ``first`` and ``first + count``."""
    found, offset = [], 0
    for start, size in held:
        low, high = max(offset, first), min(offset + size, first + count)
        if low < high:
            found.append((start + low - offset, high - low))
        offset += size
    return found


def packed_types(states: Iterable[State]) -> dict[str, Shard]:
    """The types of parameters of several blocks or uneven parts, under all their names."""
    return {
        name: state.type
        for state in states
        for name in state.names
        if isinstance(state.type, Shard) and not is_plain(state.type)
    }


def distribute(whole: Tensor, kind: Type, mesh: DeviceMesh) -> DTensor:
    """``whole``, which every rank has, as a DTensor over a mesh of one dimension.

    Nothing is communicated.
    """
    part = local_part(whole, kind, mesh.get_local_rank(), mesh.size())
    shape = list(whole.shape)
    if isinstance(kind, Shard):
        shape[kind.dim] = mesh.size() * part.shape[kind.dim]
    return DTensor.from_local(
        part,
        mesh,
        [placement_of(kind)],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def moved(value: Tensor, device: torch.device) -> Tensor:
    """A value on ``device``; one of the meta device gets memory there, with any values."""
    part = value.to_local() if isinstance(value, DTensor) else value
    part = part.detach()
    made = torch.empty_like(part, device=device) if part.is_meta else part.to(device)
    if isinstance(value, DTensor):
        made = _with_local(value, made)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, requires_grad=value.requires_grad)
    return made


def gather(part: Tensor, kind: Type, mesh: DeviceMesh) -> Tensor:
    """The whole tensor, from all ranks' parts: a collective over the mesh."""
    if not isinstance(kind, Shard):
        return part.clone()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
    ranks = mesh.size()
    return join([unpadded(p, kind, rank, ranks) for rank, p in enumerate(parts)], kind)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within, parameters that FSDP has cut are the rank's whole tensor-parallel parts."""
    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in wrapped:
        module.unshard()
    try:
        yield
    finally:
        for module in wrapped:
            module.reshard()


def full_state(
    values: Mapping[str, Tensor], states: Sequence[State], mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Whole plain tensors under all names of ``values``, ties kept as one tensor."""
    kinds = {name: state for state in states for name in state.names}
    done: dict[str, Tensor] = {}
    full: dict[str, Tensor] = {}
    for name, value in values.items():
        state = kinds.get(name)
        key = state.names[0] if state else name
        if key not in done:
            value = value.detach()
            if isinstance(value, DTensor):
                assert mesh is not None
                assert state is not None
                done[key] = gather(value.to_local(), state.type, mesh)
            else:
                done[key] = value.clone()
        full[name] = done[key]
    return full


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All names of all parameters and buffers, module by module, as a state dict orders them."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, value


def show_whole_gradient(kind: Shard, parameter: Tensor) -> None:
    if isinstance(parameter.grad, DTensor):
        with_full_tensor(parameter.grad, kind)


def cut_whole_tensors(
    state_dict: dict[str, Any],
    prefix: str,
    states: Iterable[State],
    parameters: Mapping[str, Tensor],
) -> None:
    """Replace whole tensors of a state dict by DTensors like the parameters, and pieces of packed
    ones (:func:`in_pieces`) likewise.

    Raises:
        InputError: a tensor has another shape than the original's.
    """
    known = {name: state for state in states for name in state.names}
    for name, value in list(state_dict.items()):
        own = parameters.get(name.removeprefix(prefix))
        if not isinstance(own, DTensor):
            continue
        state = known[name.removeprefix(prefix)]
        if isinstance(value, DTensor):
            if not is_native(state.type):
                state_dict[name] = from_pieces(value, own)
            continue
        if tuple(value.shape) != state.spec.shape:
            raise InputError(f"{name}: shape {list(value.shape)}, not {list(state.spec.shape)}")
        state_dict[name] = distribute(value.to(own.device), state.type, own.device_mesh)
