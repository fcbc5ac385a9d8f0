"""Random calls of ops that look elements up, or write them, by index."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.property.pick import Pick
from tests.property.rule_checks import Case, Maker, Target

aten = torch.ops.aten


def embedding(p: Pick) -> Case:
    rows = p.size()
    indices = p.ints(rows, *p.shape(0, 2))
    options = p.one(((), (0,), (-1, False), (-1, True), (rows - 1, False, False)))
    return Case(aten.embedding.default, (p.x(rows, p.size()), indices, *options))


def embedding_bag(p: Pick) -> Case:
    rows, count, mode = p.size(), p.number(1, 5), p.number(0, 2)
    offsets = torch.tensor(sorted([0, *(p.number(0, count) for _ in range(p.number(0, 2)))]))
    weights = p.x(count) if mode == 0 and p.flag() else None
    args = (p.x(rows, p.size()), p.ints(rows, count), offsets, False, mode, False, weights)
    return Case(aten._embedding_bag.default, args)


def gather(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    shape = [size if p.number(0, 3) else p.number(1, size) for size in x.shape]
    if shape:
        shape[dim] = p.size()
    index = p.ints(x.shape[dim] if shape else 1, *shape)
    return Case(aten.gather.default, (x, dim, index))


def index_select(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    rows = x.shape[dim] if x.dim() else 1
    index = p.ints(rows, p.size()) if x.dim() and p.number(0, 4) else p.ints(rows)
    return Case(aten.index_select.default, (x, dim, index))


def index(p: Pick) -> Case:
    """One to three index tensors that broadcast, apart or side by side, and a mask at times."""
    x = p.x(*(p.shape(1, 4) if p.flag() else p.shape(4, 4)))
    if p.number(0, 9) == 0:
        return Case(aten.index.Tensor, (x, [p.bools(*x.shape[: p.number(1, x.dim())])]))
    places = p.some(range(x.dim()))[:3]
    shape = [p.one((1, 2, 3, 4)) for _ in range(p.number(0, 2))]
    indices: list[Tensor | None] = [None] * (max(places) + 1)
    for place in places:
        indices[place] = p.ints(x.shape[place], *p.broadcast(shape))
    square = [i for i in places if x.shape[i] == x.shape[places[0]]]
    if len(square) > 1 and p.flag():
        indices[square[1]] = indices[square[0]]
    return Case(aten.index.Tensor, (x, indices))


def scatter(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 3))
        dim = p.dim(x.dim())
        shape = [size if p.number(0, 3) else p.number(1, size) for size in x.shape]
        base = p.ints(1, *shape)
        if shape:  # without repetitions along dim: their order is not defined
            order = p.permutation(x.shape[dim])[: shape[dim]]
            view = [1] * len(shape)
            view[dim] = -1
            base = base + order.view(view)
        if target is aten.scatter.value:
            return Case(target, (x, dim, base, 1.5))
        larger = [size + p.one((0, 0, 0, 1)) for size in shape]
        source = p.x(*larger)
        # The gradient needs a source of the index's shape.
        return Case(target, (x, dim, base, source), constant=(source,) if larger != shape else ())

    return make


def index_add(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim, count = p.dim(x.dim()), p.size()
    rows = x.shape[dim] if x.dim() else 1
    if not x.dim():
        return Case(aten.index_add.default, (x, dim, p.ints(1, 1), p.x()))
    shape = list(x.shape)
    shape[dim] = count
    alpha = {"alpha": 2} if p.flag() else {}
    return Case(aten.index_add.default, (x, dim, p.ints(rows, count), p.x(*shape)), alpha)


def index_copy(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    count = p.number(1, x.shape[dim])
    shape = list(x.shape)
    shape[dim] = count
    index = p.permutation(x.shape[dim])[:count]
    return Case(aten.index_copy.default, (x, dim, index, p.x(*shape)))


def index_fill(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    rows = x.shape[dim] if x.dim() else 1
    index = p.ints(rows, p.size())
    if p.flag():
        return Case(aten.index_fill.int_Tensor, (x, dim, index, p.x()))
    return Case(aten.index_fill.int_Scalar, (x, dim, index, 1.5))


def index_put(p: Pick) -> Case:
    """One or two index tensors side by side or apart, all distinct; values broadcast."""
    x = p.x(*p.shape(1, 4))
    first = p.number(0, x.dim() - 1)
    indices: list[Tensor | None] = [None] * first
    count = p.number(1, x.shape[first])
    indices.append(p.permutation(x.shape[first])[:count])
    if x.dim() > first + 1 and p.flag():
        if x.dim() > first + 2 and p.number(0, 3) == 0:
            indices.append(None)
        indices.append(p.ints(x.shape[len(indices)], count))
    shape = p.broadcast(x[tuple(slice(None) if i is None else i for i in indices)].shape)
    return Case(aten.index_put.default, (x, indices, p.x(*shape), p.flag()))


def scatter_reduce(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    index = p.ints(x.shape[dim] if x.dim() else 1, *x.shape)
    args = (x, dim, index, p.x(*x.shape), p.one(("sum", "amax", "mean")))
    return Case(aten.scatter_reduce.two, args, {"include_self": p.flag()})


def bucketize(p: Pick) -> Case:
    return Case(aten.bucketize.Tensor, (p.x(*p.shape(0, 3)), p.x(4).sort().values))


def searchsorted(p: Pick) -> Case:
    return Case(aten.searchsorted.Tensor, (p.x(4).sort().values, p.x(*p.shape(0, 3))))


def isin(p: Pick) -> Case:
    return Case(aten.isin.Tensor_Tensor, (p.ints(5, *p.shape(0, 3)), p.ints(5, p.size())))


def slice_scatter(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim, size = p.dim(x.dim()), 0
    while not size:
        start, end = p.number(0, x.shape[dim] - 1), p.one((None, x.shape[dim], 2**63 - 1))
        step = p.one((1, 1, 2))
        size = len(range(*slice(start, end, step).indices(x.shape[dim])))
    shape = list(x.shape)
    shape[dim] = size
    source = p.like(x) if shape == list(x.shape) else p.x(*shape)
    return Case(aten.slice_scatter.default, (x, source, dim, start, end, step))


def select_scatter(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    source = p.x(*(size for i, size in enumerate(x.shape) if i != dim % x.dim()))
    return Case(aten.select_scatter.default, (x, source, dim, p.dim(x.shape[dim])))


def one_hot(p: Pick) -> Case:
    classes = p.one((1, 2, 3, 4))
    return Case(aten.one_hot.default, (p.ints(classes, *p.shape(0, 3)), p.one((classes, 4, -1))))
