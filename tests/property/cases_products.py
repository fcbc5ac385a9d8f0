"""Random calls of contractions, norms and losses."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.property.pick import Pick
from tests.property.rule_checks import Case, Maker, Target

aten = torch.ops.aten


def linear(p: Pick) -> Case:
    x = p.x(*p.shape(0, 2), p.size())
    weight = p.x(p.size(), x.shape[-1])
    if x.shape == weight.shape:
        weight = p.like(x)
    bias = [p.x(weight.shape[0])] if p.flag() else p.one(([], [None]))
    return Case(aten.linear.default, (x, weight, *bias))


def addmm(p: Pick) -> Case:
    m, k, n = p.size(), p.size(), p.size()
    bias = p.x(*p.broadcast([m, n]))
    scales = p.one(({}, {"beta": 2, "alpha": 3}, {"alpha": 2}))
    return Case(aten.addmm.default, (bias, p.x(m, k), p.x(k, n)), scales)


def mm(p: Pick) -> Case:
    x = p.x(p.size(), p.size())
    y = p.like(x) if x.shape[0] == x.shape[1] else p.x(x.shape[1], p.size())
    return Case(aten.mm.default, (x, y))


def bmm(p: Pick) -> Case:
    b, m, k = p.shape(3, 3)
    return Case(aten.bmm.default, (p.x(b, m, k), p.x(b, k, p.one((1, 2, 3, 4, 6)))))


def mv(p: Pick) -> Case:
    x = p.x(p.size(), p.size())
    return Case(aten.mv.default, (x, p.x(x.shape[1])))


def dot(p: Pick) -> Case:
    x = p.x(p.size())
    return Case(aten.dot.default, (x, p.like(x)))


def vdot(p: Pick) -> Case:
    x = p.x(p.size())
    y = p.like(x)
    if p.number(0, 3) == 0:
        return Case(aten.vdot.default, (torch.complex(x, y), torch.complex(y, x)))
    return Case(aten.vdot.default, (x, y))


def baddbmm(p: Pick) -> Case:
    b, m, k, n = p.shape(4, 4)
    scales = p.one(({}, {}, {"beta": 2, "alpha": 3}))
    bias = p.x(*p.broadcast([b, m, n]))
    return Case(aten.baddbmm.default, (bias, p.x(b, m, k), p.x(b, k, n)), scales)


def addmv(p: Pick) -> Case:
    m, k = p.size(), p.size()
    scales = p.one(({}, {}, {"beta": 2}))
    return Case(aten.addmv.default, (p.x(*p.broadcast([m])), p.x(m, k), p.x(k)), scales)


def grouped_mm(p: Pick) -> Case:
    """Sizes that the kernel takes: rows of 16 bytes."""
    groups, k, n = p.number(1, 3), 16 * p.number(1, 3), 16 * p.number(1, 3)
    counts = torch.tensor([p.number(0, 4) for _ in range(groups)])
    rows = max(int(counts.sum()), 1)
    ends = counts.cumsum(0).clamp(max=rows).int()
    ends[-1] = rows
    x, weight = p.x(rows, k).float(), p.x(groups, k, n).float()
    return Case(aten._grouped_mm.default, (x, weight, ends))


def distances(p: Pick) -> Case:
    batch, d = p.shape(0, 2), p.size()
    x, y = p.x(*batch, p.size(), d), p.x(*batch, p.size(), d) + 1
    return Case(aten._cdist_forward.default, (x, y, 2.0, None))


def matmul(p: Pick) -> Case:
    """All combinations of ranks, with broadcast batches."""
    batch, (m, k, n) = p.shape(0, 2), p.shape(3, 3)
    shapes = {"1": [k], "2": [m, k], "n": [*p.broadcast(batch), m, k]}
    others = {"1": [k], "2": [k, n], "n": [*p.broadcast(batch), k, n]}
    return Case(
        aten.matmul.default, (p.x(*p.one([*shapes.values()])), p.x(*p.one([*others.values()])))
    )


def einsum(p: Pick) -> Case:
    sizes = dict(zip("abcde", [p.one((1, 2, 3, 4, 6)) for _ in "abcde"], strict=True))
    terms = ["".join(p.some("abcde")[:3]) for _ in range(p.number(1, 3))]
    used = sorted(set("".join(terms)))
    out = "".join(p.some(used, 0)[:3])
    tensors = [p.x(*(sizes[letter] for letter in term)) for term in terms]
    if len(terms) > 1 and tensors[0].shape == tensors[1].shape:
        tensors[1] = p.like(tensors[0])
    return Case(aten.einsum.default, (",".join(terms) + "->" + out, tensors))


def einsum_usual(p: Pick) -> Case:
    """Equations that models hold, and forms that only torch reads (spread, implicit, repeated)."""
    equation = p.one(
        (
            "bhqd,bhkd->bhqk",
            "bqhd,bkhd->bhqk",
            "bij,bjk->bik",
            "i,j->ij",
            "bse, ed -> bsd",
            "ab,ac->a",
            "ab,bc,cd->ad",
            "ab,ab->",
            "...ij,jk->...ik",
            "ab,bc",
            "aab->b",
            "ab,cb->ac",
        )
    )
    letters = sorted(set(equation) - set(",-> ."))
    sizes = {letter: p.one((2, 3, 4, 6)) for letter in letters}
    terms = equation.replace(" ", "").split("->")[0].split(",")
    shapes = [
        [n for c in term.replace("...", ".") for n in ([2, 3] if c == "." else [sizes[c]])]
        for term in terms
    ]
    return Case(aten.einsum.default, (equation, [p.x(*shape) for shape in shapes]))


def convolution(rank: int, target: Target) -> Maker:
    def make(p: Pick) -> Case:
        groups = p.one((1, 1, 2, 3, 4))
        inner, outer = groups * p.one((1, 2, 3, 4)), groups * p.one((1, 2, 4))
        kernel = [p.number(1, 3) for _ in range(rank)]
        spatial = [p.number(3, 6 if rank < 3 else 4) for _ in range(rank)]
        x = p.x(*([p.one((1, 2, 3, 4))] if p.flag() else []), inner, *spatial)
        weight = p.x(outer, inner // groups, *kernel)
        bias = p.x(outer) if p.flag() else None
        stride, padding = [p.number(1, 2)] * rank, [p.number(0, 1)] * rank
        return Case(target, (x, weight, bias, stride, padding, [1] * rank, groups))

    return make


def weight_norm(p: Pick) -> Case:
    v = p.x(*p.shape(1, 3))
    dim = p.one((0, v.dim() - 1))
    g = p.x(*(size if d == dim else 1 for d, size in enumerate(v.shape)))
    return Case(aten._weight_norm_interface.default, (v, g, dim))


def attention(p: Pick) -> Case:
    """Plain, causal, masked, with grouped queries; masks of every shape that broadcasts."""
    rank = p.one((3, 4, 4, 5))
    batch = [p.one((1, 2, 3, 4)) for _ in range(rank - 3)]
    heads, group = p.one((1, 2, 3, 4, 6)), p.one((1, 1, 2, 3, 4))
    s, t, d, e = p.one((1, 2, 3, 4)), p.one((1, 2, 3, 4)), p.one((1, 2, 4)), p.one((1, 2, 4))
    kind = p.one(("plain", "causal", "mask", "mask", "float mask"))
    if kind == "causal":
        t = s
    q, k, v = p.x(*batch, heads * group, s, d), p.x(*batch, heads, t, d), p.x(*batch, heads, t, e)
    if q.shape == k.shape:
        k = p.like(q)
    full = [*batch, heads * group, s, t]
    mask: Tensor | None = None
    if "mask" in kind:
        shape = full[p.number(0, len(full) - 2) :]
        shape = [1 if p.number(0, 2) == 0 else size for size in shape]
        mask = p.bools(*shape) if kind == "mask" else p.x(*shape)
        if mask.dtype == torch.bool:
            mask = mask | (torch.arange(shape[-1]) == 0)
    gqa = group > 1 or p.flag()
    scale = {"scale": 0.5} if p.flag() else {}
    return Case(
        aten.scaled_dot_product_attention.default,
        (q, k, v, mask, 0.0, kind == "causal"),
        {"enable_gqa": gqa, **scale},
    )


def attention_of_broadcast_batches(p: Pick) -> Case:
    """Keys and values that many queries share by broadcasting."""
    b, h, s, t = p.one((2, 3, 4)), p.one((2, 3, 4)), p.one((2, 4)), p.one((2, 3))
    q, k = p.x(b, h, s, 4), p.x(*p.one(((1, h), (b, 1), (1, 1))), t, 4)
    return Case(aten.scaled_dot_product_attention.default, (q, k, p.like(k)))


# --- norms and losses ----------------------------------------------------------------------------


def norm(target: Target, *, bias: bool) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(1, 3))
        count = p.number(1, x.dim())
        shape = list(x.shape[-count:])
        given = p.number(0, 2 if bias else 1)
        weights = [p.x(*shape) for _ in range(given)]
        return Case(target, (x, shape, *weights))

    return make


def batch_norm(p: Pick) -> Case:
    n, c = p.one((2, 3, 4)), p.size()
    x = p.x(n, c, *p.shape(0, 2)[:2]) if p.flag() else p.x(n, c)
    weight, bias = (p.x(c), p.x(c)) if p.flag() else (None, None)
    training = p.flag()
    mean, var = (None, None) if training else (p.x(c), p.positive(c))
    constant = () if mean is None or var is None else (mean, var)
    args = (x, weight, bias, mean, var, training, 0.1, 1e-5, False)
    return Case(aten.batch_norm.default, args, constant=constant)


def batch_norm_functional(p: Pick) -> Case:
    n, c = p.one((2, 3, 4)), p.size()
    x = p.x(n, c, *p.shape(0, 2)[:2])
    mean, var = p.x(c), p.positive(c)
    weights = (p.x(c), p.x(c)) if p.flag() else (None, None)
    args = (x, *weights, mean, var, p.one((True, True, False)), 0.1, 1e-5)
    return Case(aten._native_batch_norm_legit_functional.default, args, constant=(mean, var))


def cross_entropy(p: Pick) -> Case:
    n, c = p.size(), p.one((2, 3, 4, 6))
    smoothing = p.one((0.0, 0.1))
    return _class_loss(p, aten.cross_entropy_loss.default, (n, c), smoothing)


def cross_entropy_other(p: Pick) -> Case:
    """Targets that are probabilities, more dimensions, no batch."""
    n, c = p.one((2, 4)), p.one((2, 4))
    if p.number(0, 2) == 0:
        args = (p.x(n, c), p.positive(n, c), None, p.number(0, 2))
        return Case(aten.cross_entropy_loss.default, args)
    return class_loss(aten.cross_entropy_loss.default, 0.1)(p)


def class_loss(target: Target, *extra: float) -> Maker:
    """Losses of class indices, of all numbers of dimensions."""

    def make(p: Pick) -> Case:
        shape = p.one(((p.one((2, 4)),), (2, 4), (3, 6), (2, 4, 3), (2, 4, 2, 2)))
        return _class_loss(p, target, shape, *extra)

    return make


def _class_loss(p: Pick, target: Target, shape: tuple[int, ...], *extra: float) -> Case:
    place = min(len(shape) - 1, 1)
    classes = shape[place]
    ids = p.ints(classes, *shape[:place], *shape[place + 1 :])
    ignored = p.one((-100, 0))
    if ids.dim() and len(ids) > 1:
        ids[1:][p.bools(*ids[1:].shape)] = ignored
    weight = p.positive(classes) if p.flag() else None
    args = (p.x(*shape), ids, weight, p.number(0, 2), ignored, *extra)
    return Case(target, args, constant=() if weight is None else (weight,))


def loss(target: Target, *extra: float) -> Maker:
    """``reduction`` none, mean or sum; a target that broadcasts, at times."""

    def make(p: Pick) -> Case:
        shape = p.shape(0, 3)
        x, y = p.x(*shape), p.positive(*(shape if p.number(0, 4) else p.broadcast(shape)))
        return Case(target, (x, y, p.number(0, 2), *extra), constant=(y,))

    return make


def binary_loss(target: Target, *absent: None) -> Maker:
    """Cross entropies of two classes, with an elementwise weight at times."""

    def make(p: Pick) -> Case:
        shape = p.shape(0, 3)
        x, y = p.positive(*shape), p.positive(*shape)
        weight = p.positive(*p.broadcast(shape)) if p.number(0, 2) == 0 else None
        constant = (y,) if weight is None else (y, weight)
        return Case(target, (x, y, weight, *absent, p.number(0, 2)), constant=constant)

    return make
