"""What each conversion does to one rank's tensor, without autograd.

Every collective runs once, on dimension 0 of a contiguous tensor, whatever the layout:
:func:`_by_rank` brings the parts of each rank together, :func:`_whole` puts them back in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from graphpar.errors import InternalError

_c10d = torch.ops._c10d_functional
_wait = _c10d.wait_tensor.default


def rank_and_size(group: str) -> tuple[int, int]:
    """This process's rank in the named group, and the group's size."""
    found = process_group(group)
    return found.rank(), found.size()


def name_on_rank(group: str, rank: int) -> str:
    """The group's name on one rank, which all ops take as the group.

    A compiled graph may have the rank built in. Compilers keep their results on disk by what the
    graph says, and ranks share the disk: with the rank in the name, they share no result.
    """
    return f"{group}@{rank}"


def plain_name(group: str) -> str:
    """The name that torch knows the group by."""
    return group.partition("@")[0]


def process_group(name: str) -> ProcessGroup:
    return distributed_c10d._resolve_process_group(plain_name(name))  # type: ignore[attr-defined,arg-type]


def convert(x: Tensor, group: str) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, dst: str, group: str) -> Tensor:
    return _wait(_c10d.all_reduce.default(x, "sum", plain_name(group)))  # type: ignore[no-any-return]


def all_gather(x: Tensor, dim: int, blocks: Sequence[int], dst: str, group: str) -> Tensor:
    _, ranks = rank_and_size(group)
    _check(x.size(dim) * ranks, blocks, ranks)
    parts = _wait(_c10d.all_gather_into_tensor.default(x.contiguous(), ranks, plain_name(group)))
    return _whole(parts, dim, blocks, ranks)


def reduce_scatter(x: Tensor, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    found = process_group(group)
    ranks = found.size()
    _check(x.size(dim), blocks, ranks)
    parts = _by_rank(x, dim, blocks, ranks)
    if _is_gloo(found, x.device):
        sizes = [parts.size(0) // ranks] * ranks
        received = _wait(_c10d.all_to_all_single.default(parts, sizes, sizes, plain_name(group)))
        return received.unflatten(0, (ranks, -1)).sum(0, dtype=x.dtype)  # type: ignore[no-any-return]
    return _wait(  # type: ignore[no-any-return]
        _c10d.reduce_scatter_tensor.default(parts, "sum", ranks, plain_name(group))
    )


def _is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether reduce_scatter_tensor would all-reduce the whole tensor, at twice the traffic."""
    return device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)


def all_to_all(
    x: Tensor,
    src_dim: int,
    src_blocks: Sequence[int],
    dst_dim: int,
    dst_blocks: Sequence[int],
    group: str,
) -> Tensor:
    rank, ranks = rank_and_size(group)
    _check(x.size(src_dim) * ranks, src_blocks, ranks)
    _check(x.size(dst_dim) * (ranks if src_dim == dst_dim else 1), dst_blocks, ranks)
    if src_dim == dst_dim:
        return _relayout(x, src_dim, tuple(src_blocks), tuple(dst_blocks), rank, ranks, group)
    sent = _by_rank(x, dst_dim, dst_blocks, ranks)
    sizes = [sent.size(0) // ranks] * ranks
    received = _wait(_c10d.all_to_all_single.default(sent, sizes, sizes, plain_name(group)))
    return _whole(received, src_dim, src_blocks, ranks)


def shard(x: Tensor, src: str, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    rank, ranks = rank_and_size(group)
    _check(x.size(dim), blocks, ranks)
    return part_of(x, dim, blocks, rank, ranks)


def part_of(x: Tensor, dim: int, blocks: Sequence[int], rank: int, ranks: int) -> Tensor:
    """A contiguous copy of the rank's part of ``x``."""
    if _equal(blocks):
        parts: Tensor = x.unflatten(dim, (len(blocks), ranks, blocks[0] // ranks))
        parts = parts.select(dim + 1, rank)
        return parts.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
    pieces = [x.narrow(dim, start, size) for start, size in intervals(tuple(blocks), rank, ranks)]
    return torch.cat(pieces, dim).contiguous()


def pad(x: Tensor, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    rank, ranks = rank_and_size(group)
    _check(x.size(dim) * ranks, blocks, ranks)
    shape = list(x.shape)
    shape[dim] *= ranks
    whole = x.new_zeros(shape)
    if _equal(blocks):
        count, part = len(blocks), blocks[0] // ranks
        places = whole.unflatten(dim, (count, ranks, part)).select(dim + 1, rank)
        places.copy_(x.unflatten(dim, (count, part)))
        return whole
    offset = 0
    for start, size in intervals(tuple(blocks), rank, ranks):
        whole.narrow(dim, start, size).copy_(x.narrow(dim, offset, size))
        offset += size
    return whole


KERNELS: dict[str, Callable[..., Tensor]] = {
    "convert": convert,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "shard": shard,
    "pad": pad,
}


def _check(size: int, blocks: Sequence[int], ranks: int) -> None:
    if sum(blocks) != size or any(block % ranks for block in blocks):
        raise InternalError(f"blocks {list(blocks)} do not lay out {size} over {ranks} ranks")


def _equal(blocks: Sequence[int]) -> bool:
    return len(blocks) == 1 or all(block == blocks[0] for block in blocks)


def _by_rank(x: Tensor, dim: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """The parts of ``x``, rank after rank along dimension 0: at most one copy."""
    if dim == 0 and len(blocks) == 1:
        return x.contiguous()
    if _equal(blocks):
        parts: Tensor = x.unflatten(dim, (len(blocks), ranks, blocks[0] // ranks))
        return parts.movedim(dim + 1, 0).contiguous().flatten(dim + 1, dim + 2).flatten(0, 1)
    pieces = [
        block.unflatten(dim, (ranks, block.size(dim) // ranks)).movedim(dim, 0)
        for block in x.split(list(blocks), dim)
    ]
    return torch.cat(pieces, dim + 1).contiguous().flatten(0, 1)


def _whole(parts: Tensor, dim: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """The whole tensor from the parts that lie rank after rank along dimension 0.

    The result is new memory or ``parts`` itself: at most one copy.
    """
    if dim == 0 and len(blocks) == 1:
        return parts
    by_rank: Tensor = parts.unflatten(0, (ranks, parts.size(0) // ranks))
    if _equal(blocks):
        places: Tensor = by_rank.unflatten(dim + 1, (len(blocks), blocks[0] // ranks))
        return places.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
    sizes = [block // ranks for block in blocks]
    pieces = [part.split(sizes, dim) for part in by_rank.unbind(0)]
    return torch.cat([p[b] for b in range(len(blocks)) for p in pieces], dim).contiguous()


def intervals(blocks: tuple[int, ...], rank: int, ranks: int) -> list[tuple[int, int]]:
    """(start in the whole dimension, size) of each piece that the rank holds."""
    found, start = [], 0
    for block in blocks:
        found.append((start + rank * (block // ranks), block // ranks))
        start += block
    return found


@lru_cache(maxsize=1024)
def _overlaps(
    mine: tuple[int, ...], rank: int, theirs: tuple[int, ...], other: int, ranks: int
) -> list[tuple[int, int]]:
    """(offset in my part, size) of what another rank holds too, in the order of the whole."""
    found, offset = [], 0
    for start, size in intervals(mine, rank, ranks):
        for other_start, other_size in intervals(theirs, other, ranks):
            low, high = max(start, other_start), min(start + size, other_start + other_size)
            if low < high:
                found.append((offset + low - start, high - low))
        offset += size
    return found


def _relayout(
    x: Tensor,
    dim: int,
    source: tuple[int, ...],
    target: tuple[int, ...],
    rank: int,
    ranks: int,
    group: str,
) -> Tensor:
    """All-to-all between two layouts of the same dimension."""
    everyone = range(ranks)
    sent = [_overlaps(source, rank, target, other, ranks) for other in everyone]
    received = [_overlaps(target, rank, source, other, ranks) for other in everyone]
    pieces = [x.narrow(dim, offset, size) for piece in sent for offset, size in piece]
    counts_in, counts_out = ([sum(n for _, n in p) for p in side] for side in (sent, received))
    rows = torch.cat(pieces, dim).movedim(dim, 0).contiguous()
    out = _wait(_c10d.all_to_all_single.default(rows, counts_out, counts_in, plain_name(group)))
    places = [piece for pieces in received for piece in pieces]
    arrived = out.split([size for _, size in places], 0)
    order = sorted(range(len(places)), key=places.__getitem__)
    return torch.cat([arrived[i] for i in order], 0).movedim(0, dim).contiguous()
