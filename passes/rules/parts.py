"""Rules of ops that take a dimension apart or put it together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpar.axes import Term, TermDim, TermDims, concat, fresh, segments, unify
from graphpar.passes.rules.call import Call, Operand, OpRule, Shape
from graphpar.passes.rules.einsum import new_axis
from graphpar.passes.rules.views import LINEAR


def _take_apart(x: Operand, dim: int, sizes: Sequence[int]) -> tuple[list[TermDims], OpRule]:
    """The tensor's consecutive segments along ``dim``, and a rule still without results."""
    pieces, whole = segments(x.dims[dim], sizes), list[Term]()
    if pieces is None:
        pieces, whole = fresh(sizes), list(x.dims[dim])
    rule = OpRule([], whole=whole, partial=LINEAR)
    return [[*x.dims[:dim], piece, *x.dims[dim + 1 :]] for piece in pieces], rule


def split(call: Call) -> OpRule:
    """``split``, ``split_with_sizes``, ``chunk``: segments that each keep their own axes."""
    dim = call.dim()
    pieces, rule = _take_apart(call.x, dim, [r.shape[dim] for r in call.results])
    rule.results = pieces

    def local_sizes(_: list[Shape], results: list[Shape]) -> object:
        sizes = [shape[dim] for shape in results]
        return sizes[0] if call.target is torch.ops.aten.split.Tensor else sizes

    names = ("split_size", "split_sizes")
    rule.local = {name: local_sizes for name in names if name in call.named}
    return rule


def slice_(call: Call) -> OpRule:
    """A contiguous slice is one segment."""
    dim, size = call.dim(), call.x.shape[call.dim()]
    start, end, step = call.get("start", 0), call.get("end", size), call["step"]
    start, end, step = slice(start, end, step).indices(size)
    if (start, end, step) == (0, size, 1):
        return OpRule([call.x.dims], partial=LINEAR)
    if step != 1:
        return _strided(call, dim, range(start, end, step))
    sizes = [n for n in (start, end - start, size - end) if n]
    pieces, rule = _take_apart(call.x, dim, sizes)
    rule.results = [pieces[1 if start else 0]]

    def scaled(offset: int) -> object:
        return lambda operands, _: offset * operands[0][dim] // size

    rule.local = {"start": scaled(start), "end": scaled(end)}  # type: ignore[dict-item]
    return rule


def _strided(call: Call, dim: int, taken: range) -> OpRule:
    """Every k-th element of a dimension is the n of (n, k), if it takes one of each k."""
    x, step = call.x, taken.step
    out = list(x.dims)
    out[dim] = new_axis(len(taken))
    if x.shape[dim] != len(taken) * step or taken.start >= step:
        return OpRule([out], whole=[*x.dims[dim], *out[dim]], partial=LINEAR)
    skipped = new_axis(step)
    stuck = unify(x.dims[dim], [*out[dim], *skipped])
    rule = OpRule([out], whole=[*stuck, *skipped], partial=LINEAR)
    rule.local = {"end": lambda operands, _: operands[0][dim]}
    return rule


def narrow(call: Call) -> OpRule:
    dim, size = call.dim(), call.x.shape[call.dim()]
    start, length = call["start"] % size, call["length"]
    sizes = [n for n in (start, length, size - start - length) if n]
    pieces, rule = _take_apart(call.x, dim, sizes)
    rule.results = [pieces[1 if start else 0]]
    rule.local = {
        "start": lambda operands, _: start * operands[0][dim] // size,
        "length": lambda _, results: results[0][dim],
    }
    return rule


def select(call: Call) -> OpRule:
    """``select`` and ``unbind``: the dimension goes, so it must be whole."""
    dim = call.dim()
    out = [d for i, d in enumerate(call.x.dims) if i != dim]
    return OpRule([out] * len(call.results), whole=list(call.x.dims[dim]), partial=LINEAR)


def _tensors(call: Call) -> list[Operand]:
    return list(call["tensors"])


def cat(call: Call) -> OpRule | None:
    xs = _tensors(call)
    rank = len(call.results[0].shape)
    if any(len(x.shape) != rank for x in xs):
        return None
    dim = call.dim(rank=rank)
    stuck = _tie_others(xs, skip=dim)
    out = list(xs[0].dims)
    out[dim] = concat([x.dims[dim] for x in xs]) if len(xs) > 1 else out[dim]
    return OpRule([out], whole=stuck, partial=[_all(xs)])


def stack(call: Call) -> OpRule:
    xs = _tensors(call)
    dim = call.dim(rank=len(call.results[0].shape))
    stuck = _tie_others(xs, skip=None)
    layer = new_axis(len(xs))
    out = list(xs[0].dims)
    out.insert(dim, layer)
    return OpRule([out], whole=[*stuck, *layer], partial=[_all(xs)])


def _all(xs: list[Operand]) -> set[int]:
    return {x.index for x in xs}


def _tie_others(xs: list[Operand], *, skip: int | None) -> TermDim:
    stuck: TermDim = []
    for x in xs[1:]:
        for i, (mine, other) in enumerate(zip(xs[0].dims, x.dims, strict=True)):
            if i != skip:
                stuck += unify(mine, other)
    return stuck
