"""What each conversion does to one rank's tensor, without autograd.

Every collective runs once, on dimension 0 of a contiguous tensor, whatever the layout:
:func:`_by_rank` brings the parts of each rank together, :func:`_whole` puts them back in place.
Uneven parts travel padded to the largest. :func:`start` only starts a collective, so that what
does not need its result runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from graphpar.errors import InternalError
from graphpar.ops import collectives
from graphpar.ops.collectives import Finish, process_group
from graphpar.types import Shard, cut, intervals, join, local_size


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


def convert(x: Tensor, group: str) -> Tensor:
    return x.view_as(x)


def start_all_reduce(x: Tensor, dst: str, group: str) -> Finish:
    return collectives.all_reduce(x, group)


def all_reduced(xs: Sequence[Tensor], group: str) -> list[Tensor]:
    """The sums over the group, by one collective for each dtype; results may share memory."""
    dtypes = dict.fromkeys([x.dtype for x in xs])
    if len(dtypes) == 1:
        return _sums(xs, group)
    found: dict[int, Tensor] = {}
    for dtype in dtypes:
        of_dtype = [i for i, x in enumerate(xs) if x.dtype == dtype]
        sums = _sums([xs[i] for i in of_dtype], group)
        found |= dict(zip(of_dtype, sums, strict=True))
    return [found[i] for i in range(len(xs))]


def _sums(xs: Sequence[Tensor], group: str) -> list[Tensor]:
    """Of one dtype, in one collective."""
    flat = torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in xs])
    total = collectives.all_reduce(flat, group, owned=True)()
    parts = torch.split_with_sizes(total, [x.numel() for x in xs])
    return [y if x.dim() == 1 else y.view(x.shape) for x, y in zip(xs, parts, strict=True)]


def start_all_gather(
    x: Tensor, dim: int, blocks: Sequence[int], dst: str, group: str, units: int = 0
) -> Finish:
    found = process_group(group)
    layout, _, ranks = _place_in(x, dim, blocks, units, found, local=True)
    part = (_padded(x, layout, ranks) if units else x).contiguous()
    arrived, shape = collectives.all_gather(part, group, found), part.shape

    def finish() -> Tensor:
        return _whole(arrived().view(ranks, *shape), layout, ranks)

    return finish


def start_reduce_scatter(
    x: Tensor, dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Finish:
    found = process_group(group)
    layout, rank, ranks = _place_in(x, dim, blocks, units, found)
    parts = _by_rank(x, layout, ranks)
    gloo = _is_gloo(found, x.device)
    arrived = (collectives.all_to_all if gloo else collectives.reduce_scatter)(parts, group, found)

    def finish() -> Tensor:
        part = arrived()
        if gloo:
            size, *rest = part.shape
            part = part.view(ranks, size // ranks, *rest).sum(0, dtype=part.dtype)
        return _unpadded(part, layout, rank, ranks).contiguous() if units else part

    return finish


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
    src_units: int = 0,
    dst_units: int = 0,
) -> Tensor:
    found = process_group(group)
    source, rank, ranks = _place_in(x, src_dim, src_blocks, src_units, found, local=True)
    target, _, size = _layout(dst_dim, tuple(dst_blocks), dst_units, rank, ranks)
    whole = sum(src_blocks) if src_dim == dst_dim else x.size(dst_dim)
    _check(target, whole, size, ranks)
    if src_dim == dst_dim:
        return _relayout(x, source, target, group, found)
    sent = _by_rank(_padded(x, source, ranks), target, ranks)
    by_rank = collectives.all_to_all(sent, group, found)().unflatten(0, (ranks, -1))
    if dst_units:
        by_rank = by_rank.narrow(dst_dim + 1, 0, local_size(target, rank, ranks))
    return _whole(by_rank, source, ranks)


def shard(
    x: Tensor, src: str, dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Tensor:
    return part_of(x, *_place(x, dim, blocks, units, group))


def part_of(x: Tensor, layout: Shard, rank: int, ranks: int) -> Tensor:
    """A contiguous copy of the rank's part of ``x``."""
    dim, blocks = layout.dim, layout.blocks
    if _equal(layout):
        parts: Tensor = x.unflatten(dim, (len(blocks), ranks, blocks[0] // ranks))
        parts = parts.select(dim + 1, rank)
        return parts.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
    pieces = [x.narrow(dim, *piece) for piece in intervals(layout, rank, ranks)]
    return torch.cat(pieces, dim).contiguous()


def pad(x: Tensor, dim: int, blocks: Sequence[int], group: str, units: int = 0) -> Tensor:
    layout, rank, ranks = _place(x, dim, blocks, units, group, local=True)
    shape = list(x.shape)
    shape[dim] = sum(blocks)
    whole = x.new_zeros(shape)
    if _equal(layout):
        count, part = len(blocks), blocks[0] // ranks
        places = whole.unflatten(dim, (count, ranks, part)).select(dim + 1, rank)
        places.copy_(x.unflatten(dim, (count, part)))
        return whole
    offset = 0
    for start, size in intervals(layout, rank, ranks):
        whole.narrow(dim, start, size).copy_(x.narrow(dim, offset, size))
        offset += size
    return whole


STARTS: dict[str, Callable[..., Finish]] = {
    "all_reduce": start_all_reduce,
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
}
"""The collectives that can be waited for later."""


def starter(name: str, args: Sequence[Any]) -> Callable[[Tensor], Finish]:
    """Begins the conversion ``name``; those of :data:`STARTS` run until the result is asked for."""
    begin = STARTS.get(name) or partial(partial, KERNELS[name])
    return lambda x: begin(x, *args)


def _at_once(begin: Callable[..., Finish]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        return begin(*args)()

    return run


KERNELS: dict[str, Callable[..., Tensor]] = {
    "convert": convert,
    **{name: _at_once(begin) for name, begin in STARTS.items()},
    "all_to_all": all_to_all,
    "shard": shard,
    "pad": pad,
}


def _place(
    x: Tensor, dim: int, blocks: Sequence[int], units: int, group: str, *, local: bool = False
) -> tuple[Shard, int, int]:
    """The layout of ``x`` (``local``: of which it is this rank's part), the rank and their number.

    Raises:
        InternalError: ``x`` is not laid out so.
    """
    return _place_in(x, dim, blocks, units, process_group(group), local=local)


def _place_in(
    x: Tensor,
    dim: int,
    blocks: Sequence[int],
    units: int,
    group: ProcessGroup,
    *,
    local: bool = False,
) -> tuple[Shard, int, int]:
    rank, ranks = group.rank(), group.size()
    layout, part, whole = _layout(dim, tuple(blocks), units, rank, ranks)
    if x.size(dim) != (part if local else whole):
        _check(layout, x.size(dim), part if local else whole, ranks)
    return layout, rank, ranks


@lru_cache(maxsize=4096)
def _layout(
    dim: int, blocks: tuple[int, ...], units: int, rank: int, ranks: int
) -> tuple[Shard, int, int]:
    """The layout, the sizes of the rank's part and of the whole; -1 if there is no such layout."""
    layout = Shard(dim, blocks, units)
    if any(block % (units or ranks) for block in blocks):
        return layout, -1, -1
    return layout, local_size(layout, rank, ranks), sum(blocks)


def _check(layout: Shard, size: int, wanted: int, ranks: int) -> None:
    if size != wanted:
        raise InternalError(f"{layout} does not lay out {size} elements over {ranks} ranks")


def _equal(layout: Shard) -> bool:
    blocks = layout.blocks
    return not layout.units and (len(blocks) == 1 or len(set(blocks)) == 1)


def _padded(x: Tensor, layout: Shard, ranks: int) -> Tensor:
    """This rank's part with zeros behind, as large as the first rank's."""
    lacking = local_size(layout, 0, ranks) - x.size(layout.dim) if layout.units else 0
    return F.pad(x, (*(0, 0) * (x.dim() - 1 - layout.dim), 0, lacking)) if lacking else x


def _unpadded(x: Tensor, layout: Shard, rank: int, ranks: int) -> Tensor:
    return x.narrow(layout.dim, 0, local_size(layout, rank, ranks)) if layout.units else x


def _by_rank(x: Tensor, layout: Shard, ranks: int) -> Tensor:
    """The parts of ``x``, rank after rank along dimension 0: at most one copy if they are even."""
    dim, blocks = layout.dim, layout.blocks
    if layout.units:
        parts = [_padded(cut(x, layout, rank, ranks), layout, ranks) for rank in range(ranks)]
        return torch.cat(parts).contiguous()
    if dim == 0 and len(blocks) == 1:
        return x.contiguous()
    if len(blocks) == 1:
        single: Tensor = x.unflatten(dim, (ranks, -1))
        return single.movedim(dim, 0).flatten(0, 1).contiguous()
    if _equal(layout):
        whole: Tensor = x.unflatten(dim, (len(blocks), ranks, blocks[0] // ranks))
        return whole.movedim(dim + 1, 0).contiguous().flatten(dim + 1, dim + 2).flatten(0, 1)
    pieces = [
        block.unflatten(dim, (ranks, block.size(dim) // ranks)).movedim(dim, 0)
        for block in x.split(list(blocks), dim)
    ]
    return torch.cat(pieces, dim + 1).contiguous().flatten(0, 1)


def _whole(by_rank: Tensor, layout: Shard, ranks: int) -> Tensor:
    """The whole tensor from the parts, which lie rank after rank along a new dimension 0.

    The result is new memory or that of the parts: at most one copy.
    """
    dim, blocks = layout.dim, layout.blocks
    if len(blocks) == 1 and not layout.units:
        parts_in_place = by_rank.movedim(0, dim) if dim else by_rank
        return parts_in_place.flatten(dim, dim + 1).contiguous()
    if _equal(layout):
        places: Tensor = by_rank.unflatten(dim + 1, (len(blocks), blocks[0] // ranks))
        return places.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
    parts = [_unpadded(part, layout, rank, ranks) for rank, part in enumerate(by_rank.unbind(0))]
    return join(parts, layout).contiguous()


@lru_cache(maxsize=1024)
def _overlaps(
    mine: Shard, rank: int, theirs: Shard, other: int, ranks: int
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


def _relayout(x: Tensor, source: Shard, target: Shard, group: str, found: ProcessGroup) -> Tensor:
    """All-to-all between two layouts of the same dimension."""
    rank, ranks = found.rank(), found.size()
    dim, everyone = source.dim, range(ranks)
    sent = [_overlaps(source, rank, target, other, ranks) for other in everyone]
    received = [_overlaps(target, rank, source, other, ranks) for other in everyone]
    pieces = [x.narrow(dim, offset, size) for piece in sent for offset, size in piece]
    counts_in, counts_out = ([sum(n for _, n in p) for p in side] for side in (sent, received))
    rows = torch.cat(pieces, dim).movedim(dim, 0).contiguous()
    out = collectives.all_to_all(rows, group, found, (counts_out, counts_in))()
    places = [piece for pieces in received for piece in pieces]
    arrived = out.split([size for _, size in places], 0)
    order = sorted(range(len(places)), key=places.__getitem__)
    return torch.cat([arrived[i] for i in order], 0).movedim(0, dim).contiguous()
