"""state: parameters as DTensors with the layouts of partition types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as ReplicatePlacement
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

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
