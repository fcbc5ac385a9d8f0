"""Random calls of reductions and pointwise ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.property.pick import Pick
from tests.property.rule_checks import Case, Maker, Target

aten = torch.ops.aten


def some_dims(p: Pick, rank: int) -> list[int]:
    return p.dims(rank, 0)


def reduce_all(target: Target) -> Maker:
    return lambda p: Case(target, (p.x(*p.shape(0, 3)),))


def reduce_dims(target: Target, *, before: Sequence[Any] = (), none: bool = True) -> Maker:
    """``dim`` is a list, perhaps empty, or ``None``; ``keepdim`` follows."""

    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 3))
        dims = some_dims(p, x.dim())
        dim = None if none and p.number(0, 4) == 0 else dims
        extra = [p.one(before)] if before else []
        return Case(target, (x, *extra, dim, p.flag()))

    return make


def reduce_dim(target: Target, *, bools: bool = False, none: bool = False) -> Maker:
    """``dim`` is an integer."""

    def make(p: Pick) -> Case:
        shape = p.shape(0, 3)
        x = p.bools(*shape) if bools else p.x(*shape)
        dim = None if none and p.flag() else p.dim(len(shape))
        return Case(target, (x, dim, p.flag()))

    return make


def reduce_bools(target: Target) -> Maker:
    return lambda p: Case(target, (p.bools(*p.shape(0, 3)),))


def logsumexp(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    return Case(aten.logsumexp.default, (x, p.dims(x.dim()), p.flag()))


def sum_of_integers(p: Pick) -> Case:
    """Counting: sums of booleans and integers; a sum that casts."""
    shape = p.shape(0, 3)
    x = p.one((p.bools(*shape), p.ints(9, *shape), p.x(*shape) * 3))
    cast = {"dtype": p.one((torch.int64, torch.float64))} if p.flag() else {}
    if x.is_floating_point() and cast.get("dtype") == torch.int64:
        cast = {"dtype": torch.float64}
    return Case(aten.sum.dim_IntList, (x, p.dims(len(shape), 0), p.flag()), cast)


def variance(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(1, 3))
        dims = p.one((None, p.dims(x.dim(), 0)))
        if "correction" in str(target):
            correction = p.one((0, 1, None))
            kwargs = {"correction": correction, "keepdim": p.flag()}
            return Case(target, (x, dims), kwargs)
        return Case(target, (x, dims, p.flag(), p.flag()))

    return make


def along(target: Target, *after: Any) -> Maker:
    """An op along one dimension that keeps the shape."""

    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 3))
        return Case(target, (x, p.dim(x.dim()), *after))

    return make


def flip(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    return Case(aten.flip.default, (x, p.dims(x.dim(), 0)))


def roll(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dims = p.dims(x.dim(), 0)
    shifts = [p.number(-2, 2) for _ in dims] or [p.number(-2, 2)]
    return Case(aten.roll.default, (x, shifts, dims))


def order_statistic(target: Target) -> Maker:
    """Of distinct elements, so that the one that is picked is the same everywhere."""

    def make(p: Pick) -> Case:
        shape = p.shape(1, 3)
        x = p.permutation(int(torch.Size(shape).numel())).reshape(shape).double()
        dim = p.dim(x.dim())
        k = [p.number(1, shape[dim])] if target is aten.kthvalue.default else []
        keep = [] if "cum" in str(target) else [p.flag()]
        return Case(target, (x, *k, dim, *keep))

    return make


def both_ends(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    return Case(aten.aminmax.default, (x,), {"dim": p.dim(x.dim()), "keepdim": p.flag()})


def count(p: Pick) -> Case:
    x = p.ints(2, *p.shape(0, 3))
    if p.flag():
        return Case(aten.count_nonzero.default, (x, p.one((None, p.dim(x.dim())))))
    return Case(aten.count_nonzero.dim_IntList, (x, p.dims(x.dim(), 0)))


def any_of_dims(p: Pick) -> Case:
    x = p.bools(*p.shape(0, 3))
    return Case(aten.any.dims, (x, p.one((None, p.dims(x.dim(), 1))), p.flag()))


def median(target: Target) -> Maker:
    return lambda p: Case(target, (p.permutation(p.size()).double(),))


def stable_sort(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    return Case(aten.sort.stable, (x,), {"stable": True, "dim": p.dim(x.dim())})


def topk(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    k = p.number(1, x.shape[dim] if x.dim() else 1)
    at = () if dim == -1 and p.flag() else (dim,)
    return Case(aten.topk.default, (x, k, *at))


def diff(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    n = p.number(0, min(2, x.shape[dim] - 1))
    ends = [x.narrow(dim, 0, 1).clone() if p.flag() else None for _ in range(2)]
    return Case(aten.diff.default, (x, n, dim, *ends) if n and p.flag() else (x, n, dim))


def padding(p: Pick, rank: int, least: int) -> list[int]:
    pads: list[int] = []
    for _ in range(p.number(0, rank)):
        pads += p.one(((0, 0), (0, 0), (1, 0), (0, 2), (1, 1), (1, -1), (-1, 1)))
    return [max(n, least) for n in pads]


def pad(p: Pick) -> Case:
    x = p.x(*(size + 1 for size in p.shape(1, 3)))
    return Case(aten.pad.default, (x, padding(p, x.dim(), -1), "constant", p.one((None, 1.0))))


def pad_mode(p: Pick) -> Case:
    x = p.x(*(size + 1 for size in p.shape(3, 3)))
    pads = p.one(((1, 1), (1, 0), (0, 0), (0, 1)))
    return Case(aten.pad.default, (x, list(pads), p.one(("reflect", "replicate", "circular"))))


def constant_pad(p: Pick) -> Case:
    x = p.x(*(size + 1 for size in p.shape(1, 3)))
    return Case(aten.constant_pad_nd.default, (x, padding(p, x.dim(), -1), p.one((0, 1.5))))


# --- pointwise -----------------------------------------------------------------------------------


def unary(target: Target, *after: Any, positive: bool = False) -> Maker:
    def make(p: Pick) -> Case:
        shape = p.shape(0, 4)
        return Case(target, (p.positive(*shape) if positive else p.x(*shape), *after))

    return make


def binary(target: Target, kind: str = "x") -> Maker:
    """Broadcast operands, the same tensor twice, or a Python scalar."""

    def make(p: Pick) -> Case:
        shape = p.shape(0, 4)
        tensor: Callable[..., Tensor] = {
            "x": p.x,
            "positive": p.positive,
            "bools": p.bools,
            "ints": lambda *s: p.ints(9, *s),
        }[kind]
        x, y = tensor(*p.broadcast(shape)), tensor(*p.broadcast(shape))
        if p.number(0, 3) == 0:
            x = tensor(*shape)
            y = x if p.flag() else tensor(*shape)
        return Case(target, p.one(((x, y), (x, y), (y, x))))

    return make


def floor_divide(p: Pick) -> Case:
    shape = p.shape(0, 3)
    divisor = p.ints(5, *p.broadcast(shape)) + 1
    return Case(aten.floor_divide.default, (p.ints(9, *p.broadcast(shape)), divisor))


def prelu(p: Pick) -> Case:
    shape = p.shape(2, 4)
    slope = [1] * len(shape)
    slope[1] = p.one((1, shape[1]))
    return Case(aten._prelu_kernel.default, (p.x(*shape), p.x(*slope)))


def scalar(target: Target, *after: Any) -> Maker:
    """A tensor overload called with a Python number."""
    return lambda p: Case(target, (p.x(*p.shape(0, 3)), 2.5, *after))


def with_alpha(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 3))
        return Case(target, (x, p.like(x)), {"alpha": p.one((1, 3))})

    return make


def mixed(target: Target) -> Maker:
    """A number tensor with a mask or an integer tensor."""

    def make(p: Pick) -> Case:
        shape = p.shape(0, 3)
        divisor = target is aten.div.Tensor
        mask = p.bools(*shape) | divisor
        other = p.one((mask, p.ints(5, *shape) + 1, p.ints(5) + 1))
        return Case(target, p.one(((p.x(*shape), other), (other, other))))

    return make


def where(p: Pick) -> Case:
    shape = p.shape(0, 3)
    x, y = p.x(*p.broadcast(shape)), p.x(*p.broadcast(shape))
    mask = p.bools(*p.broadcast(shape))
    form = p.number(0, 3)
    if form == 0:
        return Case(aten.where.ScalarOther, (mask, x, 0.5))
    if form == 1:
        return Case(aten.where.ScalarSelf, (mask, 0.5, x))
    return Case(aten.where.self, (mask, x, p.one((x, y))))


def masked_fill(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    mask = p.bools(*p.broadcast(x.shape))
    if p.flag():
        return Case(aten.masked_fill.Tensor, (x, mask, p.x()))
    return Case(aten.masked_fill.Scalar, (x, mask, -1e9))


def ternary(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        shape = p.shape(0, 3)
        tensors = [p.positive(*p.broadcast(shape)) for _ in range(3)]
        return Case(target, tuple(tensors))

    return make


def cast(p: Pick) -> Case:
    shape = p.shape(0, 3)
    x = p.one((p.x(*shape) * 3, p.ints(3, *shape), p.bools(*shape)))
    dtype = p.one((torch.float64, torch.int64, torch.int32, torch.bool))
    if p.flag():
        return Case(aten._to_copy.default, (x,), {"dtype": dtype})
    return Case(aten.to.dtype, (x, dtype))


def cast_as(target: Target) -> Maker:
    """``other`` gives only its type; its shape has nothing to do with the operand's."""

    def make(p: Pick) -> Case:
        x, other = p.x(*p.shape(0, 3)), p.one((p.x, p.bools))(*p.shape(0, 3))
        return Case(target, (x, p.one((x, other))))

    return make
