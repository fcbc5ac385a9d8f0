"""state: parameters as DTensors with the layouts of partition types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as ReplicatePlacement
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
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


def _pieces(
    part: Tensor, kind: Shard, rank: int, ranks: int
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """A rank's part as views of its pieces, each with its offset in the whole tensor."""
    found: list[tuple[Tensor, tuple[int, ...]]] = []
    start = 0
    for block, piece in zip(
        kind.blocks, part.split([b // ranks for b in kind.blocks], kind.dim), strict=True
    ):
        offset = [0] * part.dim()
        offset[kind.dim] = start + rank * (block // ranks)
        found.append((piece, tuple(offset)))
        start += block
    return found


def in_pieces(value: DTensor, kind: Shard) -> DTensor:
    """A DTensor over the same memory that tells DCP which pieces of the whole it holds."""
    local = value.to_local().detach()
    shards = _pieces(local, kind, value.device_mesh.get_local_rank(), value.device_mesh.size())
    wrapper = LocalShardsWrapper([part for part, _ in shards], [offset for _, offset in shards])
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
