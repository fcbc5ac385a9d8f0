"""Types and axes by themselves: layouts, blocks, unification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpar.axes import (
    Axis,
    Blocks,
    Concat,
    Dim,
    Freezer,
    TermDim,
    Unshardable,
    axes_of,
    blocks_under,
    concat,
    fresh,
    match_blocks,
    segments,
    size_of,
    unify,
)
from graphpar.types import (
    CONVERSIONS,
    I,
    P,
    R,
    Shard,
    Type,
    cut,
    dual,
    fits,
    intervals,
    join,
    local_shape,
)
from tests.property.pick import Pick, structure
from tests.property.rule_checks import RANKS, cuts_of

# --- layouts ------------------------------------------------------------------------------------


def random_shard(pick: Pick, ranks: int) -> tuple[Shard, list[int]]:
    """A layout, and the shape of a tensor that has it."""
    units = pick.one([0, 0, ranks + 1, 2 * ranks + 1])
    blocks = tuple((units or ranks) * pick.number(1, 4) for _ in range(pick.number(1, 4)))
    if pick.flag():
        blocks = (blocks[0],) * len(blocks)
    shape = pick.shape(1, 3)
    dim = pick.number(0, len(shape) - 1)
    shape[dim] = sum(blocks)
    return Shard(dim, blocks, units if ranks > 1 else 0), shape


@given(data=st.data())
def test_join_undoes_cut(data: st.DataObject) -> None:
    pick = Pick(data.draw)
    ranks = pick.one(RANKS)
    shard, shape = random_shard(pick, ranks)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [cut(x, shard, rank, ranks) for rank in range(ranks)]
    assert fits(shard, shape, ranks)
    shapes = [local_shape(shape, shard, rank, ranks) for rank in range(ranks)]
    assert [tuple(part.shape) for part in parts] == shapes
    assert torch.equal(join(parts, shard), x)


@given(data=st.data())
def test_a_rank_holds_its_part_of_every_block(data: st.DataObject) -> None:
    pick = Pick(data.draw)
    ranks = pick.one(RANKS)
    shard, _ = random_shard(pick, ranks)
    offsets = [sum(shard.blocks[:i]) for i in range(len(shard.blocks))]
    x, shard = torch.arange(sum(shard.blocks)), Shard(0, shard.blocks, shard.units)
    for rank in range(ranks):
        expected = [
            offset + i
            for offset, size in zip(offsets, shard.blocks, strict=True)
            for i in _part(size, shard.units, rank, ranks)
        ]
        assert cut(x, shard, rank, ranks).tolist() == expected
        pieces = intervals(shard, rank, ranks)
        assert [i for start, size in pieces for i in range(start, start + size)] == expected


def _part(size: int, units: int, rank: int, ranks: int) -> list[int]:
    """What a rank holds of one block, as ``tensor_split`` deals its units."""
    dealt = torch.arange(size).view(units or ranks, -1).tensor_split(ranks)
    return dealt[rank].flatten().tolist()


def test_duals_and_conversions_are_closed() -> None:
    kinds: tuple[Type, ...] = (I, R, P, Shard(0, (4,)))
    assert all(dual(dual(kind)) == kind for kind in kinds)
    letters = {str(kind)[0]: str(dual(kind))[0] for kind in kinds}
    for (source, target), (forward, backward) in CONVERSIONS.items():
        assert CONVERSIONS[letters[target], letters[source]] == (backward, forward)


# --- blocks -------------------------------------------------------------------------------------


def frozen(pick: Pick, size: int) -> Dim:
    return Freezer().dim(structure(pick, size, []))


@given(data=st.data())
def test_match_blocks_inverts_blocks_under(data: st.DataObject) -> None:
    pick = Pick(data.draw)
    dim, ranks = frozen(pick, pick.one((4, 6, 8, 12, 24, 36, 48, 72))), pick.one(RANKS)
    for cuts in cuts_of(dim):
        if any(size % ranks for blocks in cuts.values() for size in blocks):
            continue
        try:
            blocks = blocks_under(dim, cuts)
        except Unshardable:
            continue
        assert blocks is not None
        assert sum(blocks) == dim_size(dim)
        found = match_blocks(dim, blocks, ranks)
        assert found is not None
        assert blocks_under(dim, found) == blocks
        if not any(isinstance(factor, Concat) for factor in dim):
            assert found == cuts


@given(data=st.data())
def test_match_blocks_finds_only_what_has_the_blocks(data: st.DataObject) -> None:
    pick = Pick(data.draw)
    ranks = pick.one(RANKS)
    blocks: Blocks = tuple(ranks * pick.number(1, 6) for _ in range(pick.number(1, 4)))
    dim = frozen(pick, sum(blocks))
    found = match_blocks(dim, blocks, ranks)
    if found is not None:
        assert blocks_under(dim, found) == blocks
        assert all(size % ranks == 0 for sizes in found.values() for size in sizes)


def test_an_axis_that_stands_twice_or_in_some_parts_cannot_be_cut() -> None:
    a, b, c, whole = Axis(0, 4), Axis(1, 2), Axis(2, 8), Axis(3, 12)
    packed = Concat(whole, ((a, b), (a,)))
    assert blocks_under((a, b), {a: (4,)}) == (8,)
    assert blocks_under((b, a), {a: (4,)}) == (4, 4)
    assert blocks_under((packed,), {a: (4,)}) == (8, 4)
    assert blocks_under((packed,), {c: (8,)}) is None
    for dim, cuts in (
        ((a, a), {a: (4,)}),
        ((packed,), {b: (2,)}),
        ((packed, b), {a: (4,), b: (2,)}),
        ((packed,), {whole: (12,), a: (4,)}),
    ):
        with pytest.raises(Unshardable):
            blocks_under(dim, cuts)


def dim_size(dim: Dim) -> int:
    n = 1
    for factor in dim:
        n *= factor.size
    return n


# --- unification --------------------------------------------------------------------------------


def check_sizes(dim: Dim) -> None:
    """Parts fill the whole, and factors are above 1."""
    for factor in dim:
        assert factor.size > 1
        if isinstance(factor, Concat):
            assert sum(map(dim_size, factor.parts)) == factor.size
            for part in factor.parts:
                check_sizes(part)


def agree(a: Dim, b: Dim, whole: frozenset[Axis]) -> None:
    """A cut that leaves ``whole`` alone lies on both sides alike."""
    for cuts in [*cuts_of(a), *cuts_of(b)]:
        if whole.isdisjoint(cuts):
            found: list[Blocks | None] = []
            for dim in (a, b):
                try:
                    found.append(blocks_under(dim, cuts))
                except Unshardable:
                    found.append(())
            assert found[0] == found[1] or () in found


@given(data=st.data())
def test_unified_dimensions_agree_on_blocks(data: st.DataObject) -> None:
    pick, pool = Pick(data.draw), list[TermDim]()
    size = pick.one((4, 6, 8, 12, 24, 36))
    dims = [structure(pick, size, pool) for _ in range(2)]
    pool += dims
    dims += [structure(pick, size, pool) for _ in range(pick.number(0, 2))]
    pairs = [(pick.one(dims), pick.one(dims)) for _ in range(pick.number(1, 3))]
    stuck = [unify(a, b) for a, b in pairs]
    freezer = Freezer()
    for dim in dims:
        assert size_of(dim) == size
        assert dim_size(freezer.dim(dim)) == size
        check_sizes(freezer.dim(dim))
    for (a, b), terms in zip(pairs, stuck, strict=True):
        agree(freezer.dim(a), freezer.dim(b), freezer.all_axes(terms))
        if not terms:
            assert freezer.dim(a) == freezer.dim(b)


@given(data=st.data())
def test_leaves_that_divide_are_never_stuck(data: st.DataObject) -> None:
    """A split, a merge, or both: all that needs no axis to be cut at two places."""
    pick = Pick(data.draw)
    sizes = [pick.one((2, 3, 4, 6)) for _ in range(pick.number(1, 4))]
    at = sorted(pick.some(range(len(sizes)), 0))
    ends = [*at, len(sizes)]
    merged = [
        torch.Size(sizes[a:b]).numel() for a, b in zip([0, *ends[:-1]], ends, strict=True) if a < b
    ]
    a, b = fresh(sizes), fresh(merged)
    flat_a, flat_b = [t for dim in a for t in dim], [t for dim in b for t in dim]
    assert unify(flat_a, flat_b) == []
    freezer = Freezer()
    assert freezer.dim(flat_a) == freezer.dim(flat_b)
    assert [axis.size for axis in axes_of(freezer.dim(flat_b))] == sizes


@given(data=st.data())
def test_segments_keep_sizes_and_blocks(data: st.DataObject) -> None:
    pick = Pick(data.draw)
    dim = structure(pick, pick.one((4, 6, 8, 12, 24, 36)), [])
    for _ in range(pick.number(1, 2)):  # a second, different way to take the same dimension apart
        sizes = pick.sizes(size_of(dim))
        pieces = segments(dim, sizes)
        if pieces is None:
            continue
        assert [size_of(piece) for piece in pieces] == sizes
        freezer = Freezer()
        whole, parts = freezer.dim(dim), [freezer.dim(piece) for piece in pieces]
        check_sizes(whole)
        for cuts in cuts_of(whole):
            try:
                blocks = blocks_under(whole, cuts)
                each = [blocks_under(part, cuts) for part in parts]
            except Unshardable:
                continue
            if blocks is not None and None not in each:
                assert blocks == tuple(b for found in each if found for b in found)


def test_segments_of_an_axis_become_its_parts() -> None:
    (dim,) = fresh([12])
    pieces = segments(dim, [4, 8])
    assert pieces is not None
    again = segments(dim, [4, 2, 6])
    assert again is not None
    assert again[0] is pieces[0]
    freezer = Freezer()
    assert freezer.dim(again[2]) != freezer.dim(pieces[1])
    assert list(map(dim_size, map(freezer.dim, again))) == [4, 2, 6]


def test_equal_parts_viewed_as_a_product_are_one() -> None:
    """``cat`` of three heads and a view to (3, heads)."""
    parts = fresh([4, 4, 4])
    packed, viewed = concat(parts), [t for dim in fresh([3, 4]) for t in dim]
    assert unify(packed, viewed) == []
    freezer = Freezer()
    assert freezer.dim(packed) == freezer.dim(viewed)
    assert len({freezer.dim(part) for part in parts}) == 1


def test_the_same_axes_in_another_order_are_stuck() -> None:
    """Merging (n, n) and its transpose into one dimension."""
    a, b = fresh([4, 6])
    stuck = unify([*a, *b], [*b, *a])
    assert stuck
    c, d = fresh([4, 4])
    assert unify([*c, *d], [*d, *c]) == []
    freezer = Freezer()
    assert freezer.dim(c) == freezer.dim(d)
