"""Random choices, tensors and dimensions for the property tests of the rules."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from graphpar.axes import Term, TermDim, TermDims, concat, size_of
from graphpar.program import tensor_spec

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8, 12)
LIMIT = 600  # elements of a tensor, about


class Pick:
    """Random choices, as methods."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw
        self._generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def one(self, choices: Sequence[T]) -> T:
        chosen: T = self._draw(st.sampled_from(choices))
        return chosen

    def number(self, low: int, high: int) -> int:
        chosen: int = self._draw(st.integers(low, high))
        return chosen

    def flag(self) -> bool:
        return self.one((False, True))

    def order(self, items: Sequence[T]) -> list[T]:
        shuffled: list[T] = self._draw(st.permutations(items))
        return list(shuffled)

    def some(self, items: Sequence[T], least: int = 1) -> list[T]:
        """Different ones, in random order."""
        return self.order(items)[: self.number(least, len(items))]

    def size(self) -> int:
        return self.one(SIZES)

    def shape(self, low: int, high: int) -> list[int]:
        shape: list[int] = []
        for _ in range(self.number(low, high)):
            room = LIMIT // max(math.prod(shape), 1)
            shape.append(self.one([size for size in SIZES if size <= room] or [1]))
        return shape

    def dim(self, rank: int) -> int:
        """A dimension, counted from either end."""
        return self.number(-rank, rank - 1) if rank else self.one((0, -1))

    def x(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return 0.1 + 0.8 * torch.rand(shape, generator=self._generator, dtype=torch.float64)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) < 0.5

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator)

    def like(self, x: Tensor) -> Tensor:
        """Another tensor of the same shape, or the same tensor."""
        return x if self.one((False, False, True)) else self.x(*x.shape)

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to ``shape``."""
        start = self.number(0, len(shape))
        return [1 if self.number(0, 4) == 0 else size for size in shape[start:]]

    def dims(self, rank: int, least: int = 1) -> list[int]:
        """Different dimensions."""
        chosen = self.some(range(rank), min(least, rank))
        return [d - rank if self.flag() else d for d in chosen]

    def sizes(self, total: int) -> list[int]:
        """Sizes above 0 that sum to ``total``."""
        pattern = self.number(0, 3)
        if pattern == 0 and total % 3 == 0:
            return [total // 3] * 3
        if pattern == 1 and total % 2 == 0:
            return [total // 2] * 2
        inside = sorted(set(self.some(range(1, total), 0)[:3])) if total > 1 else []
        ends = [0, *inside, total]
        return [b - a for a, b in pairwise(ends)]


class Seeded(Pick):
    """Choices that follow from a number alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def one(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def order(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(list(items), len(items))


def factorisations(size: int) -> list[tuple[int, ...]]:
    """All ordered products of numbers above 1 that give ``size``."""
    if size == 1:
        return [()]
    return [
        (head, *rest)
        for head in range(2, size + 1)
        if size % head == 0
        for rest in factorisations(size // head)
    ]


def structure(pick: Pick, size: int, pool: list[TermDim]) -> TermDim:
    """An axis, a product, consecutive parts, or the axes of another dimension."""
    same = [dim for dim in pool if dim and size_of(dim) == size]
    kind = pick.number(0, 6)
    if size < 2:
        return [] if size else [Term(0)]
    if kind == 1 and same:
        return pick.one(same)
    if kind in (2, 3):
        return [Term(n) for n in pick.one(factorisations(size))]
    if kind in (4, 5):
        sizes = pick.sizes(size)
        parts = [structure(pick, n, pool) for n in sizes]
        if len(set(sizes)) == 1 and pick.flag():
            parts = [parts[0]] * len(parts)
        return concat(parts) if len(parts) > 1 else parts[0]
    return [Term(size)]


def structured(pick: Pick) -> Callable[[fx.Node], TermDims]:
    memo: dict[fx.Node, TermDims] = {}
    pool: list[TermDim] = []
    plain = pick.flag()

    def dims(node: fx.Node) -> TermDims:
        if node not in memo:
            memo[node] = []
            for size in tensor_spec(node).shape:
                dim = [Term(size)] if plain and size != 1 else structure(pick, size, pool)
                memo[node].append(dim)
                pool.append(dim)
        return memo[node]

    return dims
