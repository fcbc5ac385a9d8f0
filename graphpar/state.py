"""state: parameters as DTensors with the layouts of partition types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as ReplicatePlacement
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from graphpar.ops.kernels import intervals
from graphpar.program import State
from graphpar.types import Shard, Type, cut, join


def placement_of(kind: Type) -> Placement:
    """The DTensor placement of a parameter; packed ones are strided shards.

    Only equal blocks can be expressed; :mod:`graphpar.passes.annotate` gives parameters no other.
    """
    if not isinstance(kind, Shard):
        return ReplicatePlacement()
    if len(kind.blocks) == 1:
        return ShardPlacement(kind.dim)
    return _StridedShard(kind.dim, split_factor=len(kind.blocks))


def local_part(whole: Tensor, kind: Type, rank: int, ranks: int) -> Tensor:
    """A contiguous copy of what ``rank`` holds of ``whole``."""
    part = cut(whole, kind, rank, ranks) if isinstance(kind, Shard) else whole
    return part.detach().clone(memory_format=torch.contiguous_format)


def local_intervals(kind: Shard, rank: int, ranks: int) -> list[tuple[int, int]]:
    """(start in the whole dimension, size) of the pieces that a rank holds, in order."""
    return intervals(kind.blocks, rank, ranks)


def in_pieces(value: DTensor, kind: Shard) -> DTensor:
    """A DTensor over the same memory that tells DCP which pieces of the whole it holds."""
    local = value.to_local().detach()
    mesh = value.device_mesh
    held = local_intervals(kind, mesh.get_local_rank(), mesh.size())
    shards = list(local.split([size for _, size in held], kind.dim))
    offsets = [tuple(start * (d == kind.dim) for d in range(local.dim())) for start, _ in held]
    wrapper = LocalShardsWrapper(shards, offsets)
    made = DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    for protocol in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        setattr(made._local_tensor, protocol, getattr(wrapper, protocol))
    return made


def packed_types(states: Iterable[State]) -> dict[str, Shard]:
    """The types of parameters of several blocks, under all their names."""
    return {
        name: state.type
        for state in states
        for name in state.names
        if isinstance(state.type, Shard) and len(state.type.blocks) > 1
    }


def distribute(whole: Tensor, kind: Type, mesh: DeviceMesh) -> DTensor:
    """``whole``, which every rank has, as a DTensor over a mesh of one dimension.

    Nothing is communicated.
    """
    part = local_part(whole, kind, mesh.get_local_rank(), mesh.size())
    return DTensor.from_local(
        part,
        mesh,
        [placement_of(kind)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )


def moved(value: Tensor, device: torch.device) -> Tensor:
    """A value on ``device``; one of the meta device gets memory there, with any values."""
    part = value.to_local() if isinstance(value, DTensor) else value
    part = part.detach()
    made = torch.empty_like(part, device=device) if part.is_meta else part.to(device)
    if isinstance(value, DTensor):
        made = DTensor.from_local(
            made,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, requires_grad=value.requires_grad)
    return made


def gather(part: Tensor, kind: Type, mesh: DeviceMesh) -> Tensor:
    """The whole tensor, from all ranks' parts: a collective over the mesh."""
    if not isinstance(kind, Shard):
        return part.clone()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
    return join(parts, kind)


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
