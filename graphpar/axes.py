"""Named axes: what the dimensions of a program's tensors are made of.

A dimension is an ordered product of *factors*, major first. A factor is an :class:`Axis`, or a
:class:`Concat`: consecutive parts, each a product of its own (a packed projection, the result of
``cat``). Two dimensions that an op ties together share axes.

While a program is analysed, dimensions are lists of :class:`Term`, mutable and unified in place;
:class:`Freezer` turns them into the immutable form that nodes carry. The idea is that of
Shardy's factor rules and TOAST's named dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis; two axes are the same if their ``id`` is."""

    id: int
    size: int = field(compare=False)
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name or f"a{self.id}"


@dataclass(frozen=True, slots=True)
class Concat:
    """Consecutive parts; ``axis`` stands for the whole of them, cut without regard to parts."""

    axis: Axis
    parts: tuple[Dim, ...]

    @property
    def size(self) -> int:
        return self.axis.size

    def __str__(self) -> str:
        return "(" + " | ".join(format_dim(part) for part in self.parts) + ")"


Factor = Axis | Concat
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def format_dim(dim: Dim) -> str:
    return "·".join(map(str, dim)) or "1"


def axes_of(dim: Iterable[Factor]) -> Iterator[Axis]:
    """All axes of a dimension, inside parts too, with repetitions."""
    for factor in dim:
        if isinstance(factor, Axis):
            yield factor
        else:
            yield factor.axis
            for part in factor.parts:
                yield from axes_of(part)


class Unshardable(Exception):
    """The axis cannot be cut there: it stands twice, or in some parts only."""


def blocks_under(dim: Dim, cuts: Mapping[Axis, Blocks]) -> Blocks | None:
    """The blocks of a dimension whose axes are cut as given; ``None`` if none of them is."""
    found: tuple[int, Blocks] | None = None
    for index, factor in enumerate(dim):
        blocks = _factor_blocks(factor, cuts)
        if blocks is not None:
            if found is not None:
                raise Unshardable
            found = index, blocks
    if found is None:
        return None
    index, blocks = found
    inner = math.prod(f.size for f in dim[index + 1 :])
    outer = math.prod(f.size for f in dim[:index])
    return tuple(size * inner for size in blocks) * outer


def _factor_blocks(factor: Factor, cuts: Mapping[Axis, Blocks]) -> Blocks | None:
    if isinstance(factor, Axis):
        return cuts.get(factor)
    if factor.axis in cuts:
        if any(axis in cuts for part in factor.parts for axis in axes_of(part)):
            raise Unshardable
        return cuts[factor.axis]
    parts = [blocks_under(part, cuts) for part in factor.parts]
    if all(part is None for part in parts):
        return None
    joined: Blocks = ()
    for part in parts:
        if part is None:
            raise Unshardable
        joined += part
    return joined


def match_blocks(dim: Dim, blocks: Blocks, units: int) -> dict[Axis, Blocks] | None:
    """How the axes of ``dim`` are cut if the dimension has these blocks, each of ``units`` equal
    units: the inverse of :func:`blocks_under`; ``None`` if no cut of its axes gives them."""
    if not dim:
        return None
    head, rest = dim[0], dim[1:]
    if not rest:
        return {head: blocks} if isinstance(head, Axis) else _match_parts(head, blocks, units)
    inner = math.prod(f.size for f in rest)
    if all(size % (inner * units) == 0 for size in blocks):
        return match_blocks((head,), tuple(size // inner for size in blocks), units)
    period = blocks[: len(blocks) // head.size]
    if period * head.size == blocks and sum(period) == inner:
        return match_blocks(rest, period, units)
    return None


def _match_parts(factor: Concat, blocks: Blocks, units: int) -> dict[Axis, Blocks] | None:
    whole = {factor.axis: blocks}
    cuts: dict[Axis, Blocks] = {}
    start = 0
    for part in factor.parts:
        size, end = math.prod(f.size for f in part), start
        while sum(blocks[start:end]) < size and end < len(blocks):
            end += 1
        if sum(blocks[start:end]) != size:
            return whole
        found = match_blocks(part, blocks[start:end], units)
        if found is None or any(cuts.get(a, b) != b for a, b in found.items()):
            return whole
        cuts |= found
        start = end
    return cuts


@dataclass(frozen=True, slots=True)
class OpAxes:
    """One op in terms of axes.

    ``operands`` has an entry per tensor argument (in the order of the schema, an argument that
    stands twice has two), ``results`` one per output tensor. Axes in ``whole`` must not be cut at
    this op; a cut axis in ``contracted`` makes the results Partial; over one in ``reduced`` the op
    reduces by itself, and results without it are Invariant. Each set in ``partial`` names
    operands through which the op is linear: if all of them are Partial and the others Replicate,
    so are the results Partial. ``average``: the contraction divides by the number of elements.
    Each rank's part of a cut dimension has a ``multiple`` of so many elements.
    ``opaque``: no rule is known, everything stays whole.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[Axis] = frozenset()
    contracted: frozenset[Axis] = frozenset()
    reduced: frozenset[Axis] = frozenset()
    partial: tuple[frozenset[int], ...] = ()
    average: bool = False
    multiple: int = 1
    opaque: bool = False


# --- analysis -----------------------------------------------------------------------------------


class Term:
    """A factor under analysis: a leaf, a product of ``factors``, or a concatenation."""

    __slots__ = ("factors", "link", "name", "parts", "size")

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name
        self.link: Term | None = None
        self.factors: TermDim | None = None
        self.parts: list[TermDim] | None = None


TermDim = list[Term]
TermDims = list[TermDim]


def find(term: Term) -> Term:
    while term.link is not None:
        term = term.link
    return term


def flatten(dim: Iterable[Term]) -> TermDim:
    """The dimension as a product of leaves and concatenations, without factors of size 1."""
    flat: TermDim = []
    for term in map(find, dim):
        if term.factors is not None:
            flat += flatten(term.factors)
        elif term.size != 1:
            flat.append(term)
    return flat


def fresh(shape: Sequence[int]) -> TermDims:
    """New axes for a tensor of this shape; dimensions of size 1 have none."""
    return [[Term(size)] if size != 1 else [] for size in shape]


def size_of(dim: Iterable[Term]) -> int:
    return math.prod(term.size for term in dim)


def unify(a: TermDim, b: TermDim) -> TermDim:
    """Make two dimensions of equal size the same.

    Larger leaves are split to fit smaller ones. Returns the terms for which that cannot be: they
    must stay whole at the op that asked.
    """
    left, right = flatten(a)[::-1], flatten(b)[::-1]
    stuck: TermDim = []
    while left and right:
        x, y = _next(left), _next(right)
        if x is y:
            continue
        if x.size == y.size:
            stuck += _merge(x, y)
        elif x.size > y.size:
            _align(x, y, left, right, stuck)
        else:
            _align(y, x, right, left, stuck)
    return stuck + left + right


def _next(rest: TermDim) -> Term:
    """Pop the next leaf or concatenation of a reversed dimension, whose terms may have been
    linked or split since it was flattened."""
    term = find(rest.pop())
    while term.factors is not None:
        rest += flatten(term.factors)[::-1]
        term = rest.pop()
    return term


def _merge(x: Term, y: Term) -> TermDim:
    if x.parts is None or y.parts is None:
        old, kept = (x, y) if x.parts is None else (y, x)
        old.link = kept
        kept.name = x.name or y.name
        return []
    if not _refine(x, _offsets(y)) or not _refine(y, _offsets(x)):
        return [x, y]
    if any(unify(p, q) for p, q in zip(x.parts, y.parts, strict=True)):
        return [x, y]
    y.link = x
    return []


def _align(big: Term, small: Term, big_rest: TermDim, small_rest: TermDim, stuck: TermDim) -> None:
    """Bring ``big`` against ``small`` and what follows it (reversed lists, in place)."""
    if big.parts is None and big.size % small.size == 0:
        big.factors = [Term(small.size, big.name), Term(big.size // small.size, big.name)]
        big_rest += big.factors[::-1]
        small_rest.append(small)
        return
    mine, theirs = [big], [small]
    while (p := size_of(mine)) != (q := size_of(theirs)):
        source, group = (small_rest, theirs) if p > q else (big_rest, mine)
        if not source:
            break
        group.append(_next(source))
    equal = size_of(mine) == size_of(theirs)
    parts = big.parts
    if equal and len(mine) == 1 and parts is not None and len(parts) == small.size:
        rest = theirs[1:]
        alike = all(size_of(part) == size_of(rest) for part in parts)
        if alike and not [t for part in parts for t in unify(part, rest)]:
            # Equal parts are a product: their number, then what each is made of.
            big.parts, big.factors = None, theirs
            return
    stuck += mine + theirs


def _offsets(term: Term) -> list[int]:
    offsets, end = [], 0
    for part in term.parts or []:
        end += size_of(part)
        offsets.append(end)
    return offsets


def _refine(term: Term, offsets: Iterable[int]) -> bool:
    """Give a concatenation part boundaries at all ``offsets``, by splitting parts that are
    leaves; whether that was possible."""
    assert term.parts is not None
    parts: list[TermDim] = []
    wanted, start = sorted(offsets), 0
    for part in term.parts:
        end = start + size_of(part)
        inside = [o - start for o in wanted if start < o < end]
        if inside:
            pieces = segments(part, _sizes([*inside, end - start]))
            if pieces is None:
                return False
            parts += pieces
        else:
            parts.append(part)
        start = end
    term.parts = parts
    return True


def _sizes(offsets: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip([0, *offsets[:-1]], offsets, strict=True)]


def segments(dim: TermDim, sizes: Sequence[int]) -> list[TermDim] | None:
    """The dimension as consecutive segments of the given sizes; ``None`` if its axes forbid it.

    A leaf becomes a :class:`Concat`; a product is cut along its first factor.
    """
    flat = flatten(dim)
    if len(sizes) == 1:
        return [flat]
    if not flat or any(size == 0 for size in sizes):
        return None
    head, rest = flat[0], flat[1:]
    if rest:
        inner = size_of(rest)
        if any(size % inner for size in sizes):
            return None
        heads = [size // inner for size in sizes]
        if all(size == 1 for size in heads):
            return [rest for _ in sizes]
        pieces = segments([head], heads)
        return pieces and [[*piece, *rest] for piece in pieces]
    if head.parts is None:
        head.parts = [[Term(size, head.name)] if size != 1 else [] for size in sizes]
        return head.parts
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if not _refine(head, ends):
        return None
    grouped: list[TermDim] = []
    parts, start = iter(head.parts), 0
    for end in ends:
        group: list[TermDim] = []
        while start < end:
            group.append(next(parts))
            start += size_of(group[-1])
        grouped.append(group[0] if len(group) == 1 else concat(group))
    return grouped


def concat(parts: Sequence[TermDim]) -> TermDim:
    """The concatenation of ``parts`` as one new dimension."""
    term = Term(sum(size_of(part) for part in parts))
    term.parts = list(parts)
    return [term]


class Freezer:
    """Turns terms into axes; equal terms become equal axes, numbered in the order met."""

    def __init__(self) -> None:
        self._axes: dict[Term, Axis] = {}

    def axis(self, term: Term) -> Axis:
        term = find(term)
        if term not in self._axes:
            self._axes[term] = Axis(len(self._axes), term.size, term.name)
        return self._axes[term]

    def dim(self, dim: TermDim) -> Dim:
        return tuple(map(self._factor, flatten(dim)))

    def dims(self, dims: TermDims) -> Dims:
        return tuple(map(self.dim, dims))

    def all_axes(self, terms: TermDim) -> frozenset[Axis]:
        """Every axis within ``terms``."""
        return frozenset(axes_of(self.dim(terms)))

    def _factor(self, term: Term) -> Factor:
        axis = self.axis(term)
        if term.parts is None:
            return axis
        return Concat(axis, self.dims(term.parts))
