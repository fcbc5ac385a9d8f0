"""Random calls of every op that has a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.property.rule_checks import Case, Target, factorisations

aten = torch.ops.aten
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

    def int(self, low: int, high: int) -> int:
        number: int = self._draw(st.integers(low, high))
        return number

    def flag(self) -> bool:
        return self.one((False, True))

    def order(self, items: Sequence[T]) -> list[T]:
        shuffled: list[T] = self._draw(st.permutations(items))
        return list(shuffled)

    def some(self, items: Sequence[T], least: int = 1) -> list[T]:
        """Different ones, in random order."""
        return self.order(items)[: self.int(least, len(items))]

    def size(self) -> int:
        return self.one(SIZES)

    def shape(self, low: int, high: int) -> list[int]:
        shape: list[int] = []
        for _ in range(self.int(low, high)):
            room = LIMIT // max(math.prod(shape), 1)
            shape.append(self.one([size for size in SIZES if size <= room] or [1]))
        return shape

    def dim(self, rank: int) -> int:
        """A dimension, counted from either end."""
        return self.int(-rank, rank - 1) if rank else self.one((0, -1))

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
        start = self.int(0, len(shape))
        return [1 if self.int(0, 4) == 0 else size for size in shape[start:]]

    def dims(self, rank: int, least: int = 1) -> list[int]:
        """Different dimensions."""
        chosen = self.some(range(rank), min(least, rank))
        return [d - rank if self.flag() else d for d in chosen]

    def sizes(self, total: int) -> list[int]:
        """Sizes above 0 that sum to ``total``."""
        pattern = self.int(0, 3)
        if pattern == 0 and total % 3 == 0:
            return [total // 3] * 3
        if pattern == 1 and total % 2 == 0:
            return [total // 2] * 2
        inside = sorted(set(self.some(range(1, total), 0)[:3])) if total > 1 else []
        ends = [0, *inside, total]
        return [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]


Maker = Callable[[Pick], Case]


# --- contractions -------------------------------------------------------------------------------


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


def matmul(p: Pick) -> Case:
    """All combinations of ranks, with broadcast batches."""
    batch, (m, k, n) = p.shape(0, 2), p.shape(3, 3)
    shapes = {"1": [k], "2": [m, k], "n": [*p.broadcast(batch), m, k]}
    others = {"1": [k], "2": [k, n], "n": [*p.broadcast(batch), k, n]}
    return Case(aten.matmul.default, (p.x(*p.one([*shapes.values()])),
                                      p.x(*p.one([*others.values()]))))


def einsum(p: Pick) -> Case:
    sizes = dict(zip("abcde", [p.one((1, 2, 3, 4, 6)) for _ in "abcde"], strict=True))
    terms = ["".join(p.some("abcde")[:3]) for _ in range(p.int(1, 3))]
    used = sorted(set("".join(terms)))
    out = "".join(p.some(used, 0)[:3])
    tensors = [p.x(*(sizes[letter] for letter in term)) for term in terms]
    if len(terms) > 1 and tensors[0].shape == tensors[1].shape:
        tensors[1] = p.like(tensors[0])
    return Case(aten.einsum.default, (",".join(terms) + "->" + out, tensors))


def einsum_usual(p: Pick) -> Case:
    """Equations that models hold, and forms that only torch reads (spread, implicit, repeated)."""
    equation = p.one(
        ("bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk", "bij,bjk->bik", "i,j->ij", "bse, ed -> bsd",
         "ab,ac->a", "ab,bc,cd->ad", "ab,ab->", "...ij,jk->...ik", "ab,bc", "aab->b", "ab,cb->ac")
    )
    letters = sorted(set(equation) - set(",-> ."))
    sizes = {letter: p.one((2, 3, 4, 6)) for letter in letters}
    terms = equation.replace(" ", "").split("->")[0].split(",")
    shapes = [[n for c in term.replace("...", ".")
               for n in ([2, 3] if c == "." else [sizes[c]])] for term in terms]
    return Case(aten.einsum.default, (equation, [p.x(*shape) for shape in shapes]))


def convolution(rank: int, target: Target) -> Maker:
    def make(p: Pick) -> Case:
        groups = p.one((1, 1, 2, 3, 4))
        inner, outer = groups * p.one((1, 2, 3, 4)), groups * p.one((1, 2, 4))
        kernel = [p.int(1, 3) for _ in range(rank)]
        spatial = [p.int(3, 6 if rank < 3 else 4) for _ in range(rank)]
        x = p.x(*([p.one((1, 2, 3, 4))] if p.flag() else []), inner, *spatial)
        weight = p.x(outer, inner // groups, *kernel)
        bias = p.x(outer) if p.flag() else None
        stride, padding = [p.int(1, 2)] * rank, [p.int(0, 1)] * rank
        return Case(target, (x, weight, bias, stride, padding, [1] * rank, groups))

    return make


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
        shape = full[p.int(0, len(full) - 2) :]
        shape = [1 if p.int(0, 2) == 0 else size for size in shape]
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


# --- norms and losses ---------------------------------------------------------------------------


def norm(target: Target, *, bias: bool) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(1, 3))
        count = p.int(1, x.dim())
        shape = list(x.shape[-count:])
        given = p.int(0, 2 if bias else 1)
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
    target = p.ints(c, n)
    target[1:][p.bools(n - 1)] = -100
    weight = p.positive(c) if p.flag() else None
    smoothing = p.one((0.0, 0.1))
    args = (p.x(n, c), target, weight, p.int(0, 2), -100, smoothing)
    return Case(aten.cross_entropy_loss.default, args, constant=(weight,) if weight is not None else ())


def cross_entropy_other(p: Pick) -> Case:
    """Targets that are probabilities, more dimensions, no batch."""
    n, c, k = p.one((2, 4)), p.one((2, 4)), p.one((2, 4))
    args = p.one(
        (
            (p.x(n, c), p.positive(n, c)),
            (p.x(n, c, k), p.ints(c, n, k)),
            (p.x(c), p.ints(c)),
        )
    )
    return Case(aten.cross_entropy_loss.default, (*args, None, p.int(0, 2)))


def loss(target: Target, *extra: float, probabilities: bool = False) -> Maker:
    def make(p: Pick) -> Case:
        shape = p.shape(0, 3)
        x, y = (p.positive, p.positive)[0](*shape) if probabilities else p.x(*shape), p.positive(*shape)
        if not probabilities and p.int(0, 4) == 0:
            y = p.positive(*p.broadcast(shape))
            if y.shape != x.shape and "binary" in str(target):
                y = p.positive(*shape)
        weights: list[Any] = []
        if "binary" in str(target):
            weights = [p.one((None, None, p.positive(*shape)))]
            if "logits" in str(target):
                weights.append(None)
        constant = (y, *(w for w in weights if w is not None))
        return Case(target, (x, y, *weights, p.int(0, 2), *extra), constant=constant)

    return make


# --- views --------------------------------------------------------------------------------------


def reshape(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 4))
        shape = list(p.one(factorisations(x.numel())[:400]))
        if p.int(0, 3) == 0:  # the shape that a split or a merge leaves
            shape = list(x.shape)
            if shape:
                at = p.int(0, len(shape) - 1)
                shape[at : at + 1] = p.one(factorisations(shape[at]))
        for _ in range(p.int(0, 2)):
            shape.insert(p.int(0, len(shape)), 1)
        if shape and p.flag():
            shape[p.int(0, len(shape) - 1)] = -1
        return Case(target, (x, shape))

    return make


def flatten(p: Pick) -> Case:
    x = p.x(*p.shape(0, 4))
    if p.int(0, 3) == 0:
        return Case(aten.flatten.using_ints, (x,))
    rank = max(x.dim(), 1)
    start = p.int(0, rank - 1)
    end = p.int(start, rank - 1) - p.one((0, rank))
    return Case(aten.flatten.using_ints, (x, start - p.one((0, rank)), end))


def unflatten(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    sizes = list(p.one(factorisations(x.shape[dim]))) or [1]
    if p.flag():
        sizes.insert(p.int(0, len(sizes)), 1)
    if p.flag():
        sizes[p.int(0, len(sizes) - 1)] = -1
    return Case(aten.unflatten.int, (x, dim, sizes))


def squeeze(p: Pick) -> Case:
    x = p.x(*p.shape(0, 4))
    form = p.int(0, 2)
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
    shape = [-1 if size == old and p.flag() else size
             for size, old in zip(shape, x.shape, strict=True)]
    lead = [p.one((1, 2, 3, 4)) for _ in range(p.int(0, 2))]
    return Case(aten.expand.default, (x, [*lead, *shape]))


def repeat(p: Pick) -> Case:
    x = p.x(*p.shape(0, 2))
    return Case(aten.repeat.default, (x, [p.int(1, 3) for _ in range(x.dim() + p.int(0, 1))]))


def repeat_interleave(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.one((None, p.dim(x.dim()))) if x.dim() else None
    return Case(aten.repeat_interleave.self_int, (x, p.int(1, 4), dim))


# --- parts --------------------------------------------------------------------------------------


def split(target: Target) -> Maker:
    def make(p: Pick) -> Case:
        x = p.x(*p.shape(1, 3))
        dim = p.dim(x.dim())
        size = x.shape[dim]
        if target is aten.split.Tensor or target is aten.chunk.default:
            number: Any = p.int(1, size + 2)
        else:
            number = p.sizes(size)
            if p.int(0, 8) == 0:
                number = [0, *number]
        at = () if dim == 0 and p.flag() else (dim,)
        return Case(target, (x, number, *at))

    return make


def slice_(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    size = x.shape[dim]
    half = size // 2
    start = p.one((None, 0, half, p.int(0, size), p.int(-size, -1), -size))
    end = p.one((None, 2**63 - 1, size, half, p.int(0, size), p.int(-size, -1), -1))
    step = p.one(((), (), (1,), (2,), (3,)))
    return Case(aten.slice.Tensor, (x, dim, start, end, *step))


def narrow(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    size = x.shape[dim]
    length = p.one((size, size // 2, p.int(0, size)))
    start = p.one((0, size - length, p.int(0, size - length)))
    if start and p.flag():
        start -= size
    return Case(aten.narrow.default, (x, dim, start, length))


def select(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    return Case(aten.select.int, (x, dim, p.dim(x.shape[dim])))


def unbind(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    return Case(aten.unbind.int, (x, *p.one(((), (p.dim(x.dim()),)))[:1 if x.dim() else 0]))


def cat(p: Pick) -> Case:
    shape = p.shape(1, 3)
    dim = p.dim(len(shape))
    tensors = []
    for _ in range(p.int(1, 3)):
        mine = list(shape)
        mine[dim] = p.one((mine[dim], p.one((1, 2, 3, 4, 6))))
        same = [x for x in tensors if list(x.shape) == mine]
        tensors.append(p.like(same[0]) if same else p.x(*mine))
    if p.int(0, 9) == 0:
        tensors.append(p.x(0))
    at = () if dim == 0 and p.flag() else (dim,)
    return Case(aten.cat.default, (tensors, *at))


def stack(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    tensors = [x, *(p.like(x) for _ in range(p.int(0, 3)))]
    return Case(aten.stack.default, (tensors, p.dim(x.dim() + 1)))


# --- reductions and ops along a dimension -------------------------------------------------------


def some_dims(p: Pick, rank: int) -> list[int]:
    return p.dims(rank, 0)


def reduce_all(target: Target) -> Maker:
    return lambda p: Case(target, (p.x(*p.shape(0, 3)),))


def reduce_dims(target: Target, *, before: Sequence[Any] = (), none: bool = True) -> Maker:
    """``dim`` is a list, perhaps empty, or ``None``; ``keepdim`` follows."""

    def make(p: Pick) -> Case:
        x = p.x(*p.shape(0, 3))
        dims = some_dims(p, x.dim())
        dim = None if none and p.int(0, 4) == 0 else dims
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


def topk(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    k = p.int(1, x.shape[dim] if x.dim() else 1)
    at = () if dim == -1 and p.flag() else (dim,)
    return Case(aten.topk.default, (x, k, *at))


def diff(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim = p.dim(x.dim())
    n = p.int(0, min(2, x.shape[dim] - 1))
    ends = [x.narrow(dim, 0, 1).clone() if p.flag() else None for _ in range(2)]
    return Case(aten.diff.default, (x, n, dim, *ends) if p.flag() else (x, n, dim))


def padding(p: Pick, rank: int, least: int) -> list[int]:
    pads: list[int] = []
    for _ in range(p.int(0, rank)):
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


# --- lookups ------------------------------------------------------------------------------------


def embedding(p: Pick) -> Case:
    rows = p.size()
    indices = p.ints(rows, *p.shape(0, 2))
    options = p.one(((), (0,), (-1, False), (-1, True), (rows - 1, False, False)))
    return Case(aten.embedding.default, (p.x(rows, p.size()), indices, *options))


def gather(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    shape = [size if p.int(0, 3) else p.int(1, size) for size in x.shape]
    if shape:
        shape[dim] = p.size()
    index = p.ints(x.shape[dim] if shape else 1, *shape)
    return Case(aten.gather.default, (x, dim, index))


def index_select(p: Pick) -> Case:
    x = p.x(*p.shape(0, 3))
    dim = p.dim(x.dim())
    rows = x.shape[dim] if x.dim() else 1
    index = p.ints(rows, p.size()) if x.dim() and p.int(0, 4) else p.ints(rows)
    return Case(aten.index_select.default, (x, dim, index))


def index(p: Pick) -> Case:
    """One to three index tensors that broadcast, apart or side by side, and a mask at times."""
    x = p.x(*p.shape(1, 4))
    if p.int(0, 9) == 0:
        return Case(aten.index.Tensor, (x, [p.bools(*x.shape[: p.int(1, x.dim())])]))
    places = p.some(range(x.dim()))[:3]
    shape = [p.one((1, 2, 3, 4)) for _ in range(p.int(0, 2))]
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
        shape = [size if p.int(0, 3) else p.int(1, size) for size in x.shape]
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


def slice_scatter(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    dim, size = p.dim(x.dim()), 0
    while not size:
        start, end = p.int(0, x.shape[dim] - 1), p.one((None, x.shape[dim], 2**63 - 1))
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


# --- creation -----------------------------------------------------------------------------------


def creation(target: Target, *args: Any, new: bool = False) -> Maker:
    return lambda p: Case(target, (*([p.x(4, 4)] if new else []), *args))


def triangle(target: Target) -> Maker:
    return lambda p: Case(target, (p.x(*p.shape(2, 4)), p.int(-1, 1)))


# --- pointwise ----------------------------------------------------------------------------------


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
            "x": p.x, "positive": p.positive, "bools": p.bools, "ints": lambda *s: p.ints(9, *s)
        }[kind]
        x, y = tensor(*p.broadcast(shape)), tensor(*p.broadcast(shape))
        if p.int(0, 3) == 0:
            x = tensor(*shape)
            y = x if p.flag() else tensor(*shape)
        return Case(target, p.one(((x, y), (x, y), (y, x))))

    return make


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
    form = p.int(0, 3)
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


# --- the table ----------------------------------------------------------------------------------

CASES: Mapping[Target, Maker | tuple[Maker, ...]] = {
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.mv.default: mv,
    aten.dot.default: dot,
    aten.matmul.default: matmul,
    aten.einsum.default: (einsum, einsum_usual),
    aten.conv1d.default: convolution(1, aten.conv1d.default),
    aten.conv2d.default: convolution(2, aten.conv2d.default),
    aten.conv3d.default: convolution(3, aten.conv3d.default),
    aten.scaled_dot_product_attention.default: (attention, attention_of_broadcast_batches),
    aten.layer_norm.default: norm(aten.layer_norm.default, bias=True),
    aten.rms_norm.default: norm(aten.rms_norm.default, bias=False),
    aten.batch_norm.default: batch_norm,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten.cross_entropy_loss.default: (cross_entropy, cross_entropy_other),
    aten.mse_loss.default: loss(aten.mse_loss.default),
    aten.l1_loss.default: loss(aten.l1_loss.default),
    aten.smooth_l1_loss.default: loss(aten.smooth_l1_loss.default, 0.5),
    aten.huber_loss.default: loss(aten.huber_loss.default, 0.5),
    aten.binary_cross_entropy.default: loss(aten.binary_cross_entropy.default, probabilities=True),
    aten.binary_cross_entropy_with_logits.default: loss(
        aten.binary_cross_entropy_with_logits.default
    ),
    aten.view.default: reshape(aten.view.default),
    aten.reshape.default: reshape(aten.reshape.default),
    aten._unsafe_view.default: reshape(aten._unsafe_view.default),
    aten.flatten.using_ints: flatten,
    aten.unflatten.int: unflatten,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.unsqueeze.default: unsqueeze,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: reverse,
    aten.numpy_T.default: reverse,
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.split.Tensor: split(aten.split.Tensor),
    aten.split_with_sizes.default: split(aten.split_with_sizes.default),
    aten.split.sizes: split(aten.split.sizes),
    aten.chunk.default: split(aten.chunk.default),
    aten.slice.Tensor: slice_,
    aten.narrow.default: narrow,
    aten.select.int: select,
    aten.unbind.int: unbind,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.sum.default: reduce_all(aten.sum.default),
    aten.sum.dim_IntList: (reduce_dims(aten.sum.dim_IntList), sum_of_integers),
    aten.mean.default: reduce_all(aten.mean.default),
    aten.mean.dim: reduce_dims(aten.mean.dim),
    aten.amax.default: reduce_dims(aten.amax.default, none=False),
    aten.amin.default: reduce_dims(aten.amin.default, none=False),
    aten.max.default: reduce_all(aten.max.default),
    aten.min.default: reduce_all(aten.min.default),
    aten.max.dim: reduce_dim(aten.max.dim),
    aten.min.dim: reduce_dim(aten.min.dim),
    aten.argmax.default: reduce_dim(aten.argmax.default, none=True),
    aten.argmin.default: reduce_dim(aten.argmin.default, none=True),
    aten.all.default: reduce_bools(aten.all.default),
    aten.all.dim: reduce_dim(aten.all.dim, bools=True),
    aten.any.default: reduce_bools(aten.any.default),
    aten.any.dim: reduce_dim(aten.any.dim, bools=True),
    aten.prod.default: reduce_all(aten.prod.default),
    aten.prod.dim_int: reduce_dim(aten.prod.dim_int),
    aten.var.correction: variance(aten.var.correction),
    aten.var.dim: variance(aten.var.dim),
    aten.std.correction: variance(aten.std.correction),
    aten.std.dim: variance(aten.std.dim),
    aten.logsumexp.default: logsumexp,
    aten.linalg_vector_norm.default: reduce_dims(
        aten.linalg_vector_norm.default, before=(1, 2, 3, float("inf"))
    ),
    aten.norm.ScalarOpt_dim: reduce_dims(aten.norm.ScalarOpt_dim, before=(1, 2, None), none=False),
    aten.softmax.int: along(aten.softmax.int),
    aten._softmax.default: along(aten._softmax.default, False),
    aten.log_softmax.int: along(aten.log_softmax.int),
    aten._log_softmax.default: along(aten._log_softmax.default, False),
    aten.cumsum.default: along(aten.cumsum.default),
    aten.cumprod.default: along(aten.cumprod.default),
    aten.sort.default: (along(aten.sort.default), along(aten.sort.default, True)),
    aten.argsort.default: along(aten.argsort.default),
    aten.flip.default: flip,
    aten.topk.default: topk,
    aten.diff.default: diff,
    aten.pad.default: (pad, pad_mode),
    aten.constant_pad_nd.default: constant_pad,
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten.scatter.src: scatter(aten.scatter.src),
    aten.scatter.value: scatter(aten.scatter.value),
    aten.scatter_add.default: scatter(aten.scatter_add.default),
    aten.index_add.default: index_add,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.one_hot.default: one_hot,
    # creation
    aten.arange.default: creation(aten.arange.default, 4),
    aten.arange.start: creation(aten.arange.start, 2, 8),
    aten.arange.start_step: creation(aten.arange.start_step, 2, 8, 2),
    aten.zeros.default: creation(aten.zeros.default, [4, 6]),
    aten.ones.default: creation(aten.ones.default, [4, 6]),
    aten.full.default: creation(aten.full.default, [4, 6], 2.0),
    aten.empty.memory_format: creation(aten.empty.memory_format, [4, 6]),
    aten.scalar_tensor.default: creation(aten.scalar_tensor.default, 2.0),
    aten.new_zeros.default: creation(aten.new_zeros.default, [4, 6], new=True),
    aten.new_ones.default: creation(aten.new_ones.default, [4, 6], new=True),
    aten.new_full.default: creation(aten.new_full.default, [4, 6], 2.0, new=True),
    aten.new_empty.default: creation(aten.new_empty.default, [4, 6], new=True),
    aten.tril.default: triangle(aten.tril.default),
    aten.triu.default: triangle(aten.triu.default),
    # pointwise, a choice
    aten.relu.default: unary(aten.relu.default),
    aten.gelu.default: unary(aten.gelu.default),
    aten.rsqrt.default: unary(aten.rsqrt.default, positive=True),
    aten.neg.default: unary(aten.neg.default),
    aten.pow.Tensor_Scalar: unary(aten.pow.Tensor_Scalar, 2),
    aten.clamp.default: unary(aten.clamp.default, -0.5, 0.5),
    aten.softplus.default: unary(aten.softplus.default),
    aten.frexp.Tensor: unary(aten.frexp.Tensor),
    aten.contiguous.default: unary(aten.contiguous.default),
    aten.clone.default: unary(aten.clone.default),
    aten.alias.default: unary(aten.alias.default),
    aten.detach.default: unary(aten.detach.default),
    aten.zeros_like.default: unary(aten.zeros_like.default),
    aten.full_like.default: unary(aten.full_like.default, 2.0),
    aten.dropout.default: (
        unary(aten.dropout.default, 0.0, True), unary(aten.dropout.default, 0.5, False)
    ),
    aten.mul.Scalar: unary(aten.mul.Scalar, 3.0),
    aten.div.Scalar: unary(aten.div.Scalar, 3.0),
    aten.add.Scalar: unary(aten.add.Scalar, 3.0),
    aten.add.Tensor: (
        binary(aten.add.Tensor), with_alpha(aten.add.Tensor), scalar(aten.add.Tensor)
    ),
    aten.sub.Tensor: (
        binary(aten.sub.Tensor), with_alpha(aten.sub.Tensor), scalar(aten.sub.Tensor)
    ),
    aten.mul.Tensor: (binary(aten.mul.Tensor), scalar(aten.mul.Tensor), mixed(aten.mul.Tensor)),
    aten.div.Tensor: (
        binary(aten.div.Tensor, "positive"), scalar(aten.div.Tensor), mixed(aten.div.Tensor)
    ),
    aten.maximum.default: binary(aten.maximum.default),
    aten.gt.Tensor: binary(aten.gt.Tensor),
    aten.eq.Tensor: binary(aten.eq.Tensor, "ints"),
    aten.logical_and.default: binary(aten.logical_and.default, "bools"),
    aten.bitwise_or.Tensor: binary(aten.bitwise_or.Tensor, "bools"),
    aten.__and__.Tensor: binary(aten.__and__.Tensor, "bools"),
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.addcmul.default: ternary(aten.addcmul.default),
    aten.lerp.Tensor: ternary(aten.lerp.Tensor),
    aten.to.dtype: cast,
    aten.type_as.default: cast_as(aten.type_as.default),
    aten.to.other: cast_as(aten.to.other),
}


def makers(target: Target) -> tuple[Maker, ...]:
    found = CASES[target]
    return found if isinstance(found, tuple) else (found,)
