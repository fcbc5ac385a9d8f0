"""Random calls of views and of ops that take dimensions apart or join them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.property.pick import Pick, factorisations
from tests.property.rule_checks import Case, Maker, Target

aten = torch.ops.aten


def reshape(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 4))
        shape = list(p.one(factorisations(x.numel())[:400]))
        if p.number(0, 3) == 0:  # the shape that a split or a merge leaves
            shape = list(x.shape)
            if shape:
                at = p.number(0, len(shape) - 1)
                shape[at : at + 1] = p.one(factorisations(shape[at]))
        for _ in range(p.number(0, 2)):
            shape.insert(p.number(0, len(shape)), 1)
        if shape and p.flag():
            shape[p.number(0, len(shape) - 1)] = -1
        return Case(target, (x, shape))

    return make


def flatten(p: Pick) -> Case:
    x = p.x(*p.shape(0, 4))
    if p.number(0, 3) == 0:
        return Case(aten.flatten.using_ints, (x,))
    rank = max(x.dim(), 1)
    start = p.number(0, rank - 1)
    end = p.number(start, rank - 1) - p.one((0, rank))
    return Case(aten.flatten.using_ints, (x, start - p.one((0, rank)), end))


def unflatten(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    sizes = list(p.one(factorisations(x.shape[dim]))) or [1]
    if p.flag():
        sizes.insert(p.number(0, len(sizes)), 1)
    if p.flag():
        sizes[p.number(0, len(sizes) - 1)] = -1
    return Case(aten.unflatten.int, (x, dim, sizes))


def squeeze(p: Pick) -> Case:
    x = p.x(*p.shape(0, 4))
    form = p.number(0, 2)
    if form == 0:
        return Case(aten.squeeze.default, (x,))
    if form == 1:
        return Case(aten.squeeze.dim, (x, p.dim(x.dim())))
    return Case(aten.squeeze.dims, (x, p.dims(x.dim(), 0)))


def unsqueeze(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    return Case(aten.unsqueeze.default, (x, p.dim(x.dim() + 1)))


def permute(p: Pick) -> Case:
    x = p.x(*p.shape(0, 4))
    dims = [d - x.dim() if p.flag() else d for d in p.order(range(x.dim()))]
    return Case(aten.permute.default, (x, dims))


def transpose(p: Pick) -> Case:
    x = p.x(*p.shape(0, 4))
    return Case(aten.transpose.int, (x, p.dim(x.dim()), p.dim(x.dim())))


def reverse(p: Pick) -> Case:
    if p.flag():
        return Case(aten.t.default, (p.x(*p.shape(0, 2)),))
    return Case(aten.numpy_T.default, (p.x(*p.shape(2, 2)),))


def expand(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    shape = [p.one((2, 3, 4)) if size == 1 and p.flag() else size for size in x.shape]
    shape = [
        -1 if size == old and p.flag() else size for size, old in zip(shape, x.shape, strict=True)
    ]
    lead = [p.one((1, 2, 3, 4)) for _ in range(p.number(0, 2))]
    return Case(aten.expand.default, (x, [*lead, *shape]))


def repeat(p: Pick) -> Case:
    x = p.x(*p.shape(0, 2))
    return Case(aten.repeat.default, (x, [p.number(1, 3) for _ in range(x.dim() + p.number(0, 1))]))


def repeat_interleave(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.one((None, p.dim(x.dim()))) if x.dim() else None
    times = p.number(1, 4)
    whole = x.numel() if dim is None else x.shape[dim]
    told = p.one(({}, {"output_size": whole * times}))
    return Case(aten.repeat_interleave.self_int, (x, times, dim), told)


# --- parts ---------------------------------------------------------------------------------------


def split(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(1, 3))
        dim = p.dim(x.dim())
        size = x.shape[dim]
        if target is aten.split.Tensor or target is aten.chunk.default:
            number: Any = p.number(1, size + 2)
        else:
            number = p.sizes(size)
            if p.number(0, 8) == 0:
                number = [0, *number]
        at = () if dim == 0 and p.flag() else (dim,)
        return Case(target, (x, number, *at))

    return make


def slice_(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    size = x.shape[dim]
    half = size // 2
    start = p.one((None, 0, half, p.number(0, size), p.number(-size, -1), -size))
    end = p.one((None, 2**63 - 1, size, half, p.number(0, size), p.number(-size, -1), -1))
    step = p.one(((), (), (1,), (2,), (3,)))
    return Case(aten.slice.Tensor, (x, dim, start, end, *step))


def narrow(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    size = x.shape[dim]
    length = p.one((size, size // 2, p.number(0, size)))
    start = p.one((0, size - length, p.number(0, size - length)))
    if start and p.flag():
        start -= size
    return Case(aten.narrow.default, (x, dim, start, length))


def select(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    return Case(aten.select.int, (x, dim, p.dim(x.shape[dim])))


def unbind(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    return Case(aten.unbind.int, (x, *p.one(((), (p.dim(x.dim()),)))[: 1 if x.dim() else 0]))


def cat(p: Pick) -> Case:
    shape = p.shape(1, 3)
    dim = p.dim(len(shape))
    tensors: list[Tensor] = []
    for _ in range(p.number(1, 3)):
        mine = list(shape)
        mine[dim] = p.one((mine[dim], p.one((1, 2, 3, 4, 6))))
        same = [x for x in tensors if list(x.shape) == mine]
        tensors.append(p.like(same[0]) if same else p.x(*mine))
    if p.number(0, 9) == 0:
        tensors.append(p.x(0))
    at = () if dim == 0 and p.flag() else (dim,)
    return Case(aten.cat.default, (tensors, *at))


def stack(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    tensors = [x, *(p.like(x) for _ in range(p.number(0, 3)))]
    return Case(aten.stack.default, (tensors, p.dim(x.dim() + 1)))


def view_as_complex(p: Pick) -> Case:
    return Case(aten.view_as_complex.default, (p.x(*p.shape(0, 3), 2),))


def view_as_real(p: Pick) -> Case:
    shape = p.shape(0, 3)
    return Case(aten.view_as_real.default, (torch.complex(p.x(*shape), p.x(*shape)),))


def conjugate(p: Pick) -> Case:
    shape = p.shape(0, 3)
    return Case(aten._conj.default, (torch.complex(p.x(*shape), p.x(*shape)),))


def glu(p: Pick) -> Case:
    shape = p.shape(1, 3)
    dim = p.dim(len(shape))
    shape[dim] *= 2
    return Case(aten.glu.default, (p.x(*shape), dim))


def diagonal(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*(size + 1 for size in p.shape(2, 4)))
        first, second = p.order(range(x.dim()))[:2]
        return Case(target, (x, p.number(-1, 1), first, second - p.one((0, x.dim()))))

    return make


def diag_embed(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    first, second = p.order(range(x.dim() + 1))[:2]
    return Case(aten.diag_embed.default, (x, p.number(-1, 1), first, second))


def unfold(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    return Case(aten.unfold.default, (x, dim, p.number(1, x.shape[dim]), p.number(1, 2)))


def rot90(p: Pick) -> Case:
    x = p.x(*p.shape(2, 3))
    return Case(aten.rot90.default, (x, p.number(-3, 3), p.order(range(x.dim()))[:2]))
