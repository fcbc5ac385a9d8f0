"""Parts that look up, write, order or accumulate along a dimension; ``dim`` counts from the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Running(nn.Module):
    """What goes along a dimension in order."""

    FORMS: Mapping[str, Callable[[Tensor, int], Any]] = {
        "cumsum": lambda x, dim: x.cumsum(dim),
        "cumprod": lambda x, dim: (1.0 + 0.1 * x).cumprod(dim),
        "cummax": lambda x, dim: x.cummax(dim).values,
        "cummin": lambda x, dim: x.cummin(dim).values,
        "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
        "mean_so_far": lambda x, dim: x.cumsum(dim) / torch.ones_like(x).cumsum(dim),
        "reversed": lambda x, dim: x.flip(dim).cumsum(dim).flip(dim),
        "sort": lambda x, dim: x.sort(dim).values,
        "sorted_twice": lambda x, dim: tuple(x.sort(dim, descending=True)),
        "argsort": lambda x, dim: x.gather(dim, torch.argsort(x, stable=True, dim=dim)),
        "topk": lambda x, dim: tuple(x.topk(max(x.shape[dim] // 2, 1), dim)),
        "kept": lambda x, dim: torch.where(
            x >= x.topk(max(x.shape[dim] // 2, 1), dim).values.amin(dim, keepdim=True), x, 0.0
        ),
        "kth": lambda x, dim: x.kthvalue(1, dim).values,
        "median": lambda x, dim: x.median(dim).values,
        "max": lambda x, dim: tuple(x.max(dim)),
        "argmax": lambda x, dim: x.argmax(dim),
        "norm": lambda x, dim: (x + 0.1).norm(p=1, dim=dim, keepdim=True),
        "diff": lambda x, dim: x.diff(dim=dim, prepend=x.narrow(dim, 0, 1)),
        "softmin": lambda x, dim: F.softmin(x, dim),
        "standard": lambda x, dim: (
            (x - x.mean(dim, keepdim=True)) * (x.var(dim, correction=0, keepdim=True) + 1).rsqrt()
        ),
        "unfold": lambda x, dim: x.unfold(dim, 1, 1).sum(-1),
        "shifted": lambda x, dim: torch.cat([x.narrow(dim, -1, 1), x.narrow(dim, 0, 1)], dim),
    }

    def __init__(self, xs: Sequence[Tensor], *, form: str, dim: int = -1):
        super().__init__()
        self.function, self.dim = self.FORMS[form], dim

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.dim)


class Indexed(nn.Module):
    """Lookups and writes at places of a buffer, along ``dim``; no place is written twice but where
    that adds."""

    FORMS = (
        "select",
        "gather",
        "index",
        "pair",
        "take_along",
        "add",
        "scatter_add",
        "copy",
        "put",
        "put_added",
        "fill",
        "scatter",
        "scatter_value",
        "one_hot",
        "mask",
        "reduced",
    )

    def __init__(self, xs: Sequence[Tensor], *, form: str, dim: int = -1):
        super().__init__()
        self.form, self.dim, x = form, dim, xs[0]
        size = x.shape[dim]
        self.register_buffer("places", torch.randperm(size)[: max(size // 2, 1)])
        self.register_buffer("again", torch.randint(size, (size + 1,)))
        self.register_buffer("spread", torch.randint(size, tuple(x.shape)))
        self.register_buffer("mask", torch.rand(tuple(x.shape)) < 0.5)
        self.places: Tensor
        self.again: Tensor
        self.spread: Tensor
        self.mask: Tensor

    def _at(self, places: Any) -> tuple[Any, ...]:
        return (..., places, *[slice(None)] * (-self.dim - 1))

    def forward(self, x: Tensor) -> Tensor:
        form, dim, places = self.form, self.dim, self.places
        if form == "select":
            return x.index_select(dim, self.again)
        if form == "gather":
            return x.gather(dim, self.spread)
        if form == "index":
            return x[self._at(self.again)]
        if form == "pair":
            rows = places % x.shape[0]
            return x[rows, ..., places] if dim == -1 else x[rows]
        if form == "take_along":
            order = x.detach().argsort(dim)
            return torch.take_along_dim(x, order, dim)
        source = (2.0 * x).index_select(dim, places)
        if form == "add":
            return x.index_add(dim, places, source, alpha=0.5)
        if form == "scatter_add":
            return torch.zeros_like(x).scatter_add(dim, self.spread, x)
        if form == "copy":
            return x.index_copy(dim, places, source.tanh())
        if form == "scatter":
            index = places.view(-1, *[1] * (-dim - 1)).expand(source.shape)
            return x.scatter(dim, index, source.sin())
        if form == "scatter_value":
            return x.scatter(dim, self.spread, 0.5)
        if form == "fill":
            return x.index_fill(dim, places, 0.25)
        if form == "one_hot":
            chosen = F.one_hot(self.again, x.shape[dim]).to(x.dtype)
            return x.movedim(dim, -1) @ chosen.T
        if form == "mask":
            return x.masked_fill(self.mask, 0.5) + torch.where(self.mask, x, -x)
        if form == "reduced":
            return x.scatter_reduce(dim, self.spread, x * 0.5, "sum")
        y = x.clone()
        if form == "put_added":
            y[self._at(self.again)] += 1.0
        else:
            y[self._at(places)] = source
        return y


class InPlace(nn.Module):
    """Writes into a value that is made in forward, or into a view of it."""

    FORMS = (
        "slice",
        "slice_scaled",
        "view",
        "transposed",
        "select",
        "masked",
        "copied",
        "chained",
        "zeroed",
        "strided",
        "filled",
    )

    def __init__(self, xs: Sequence[Tensor], *, form: str, dim: int = -1):
        super().__init__()
        self.form, self.dim = form, dim

    def forward(self, x: Tensor) -> Tensor:
        form, dim = self.form, self.dim
        y, half = x * 1.0, max(x.shape[dim] // 2, 1)
        part = y.narrow(dim, 0, half)
        if form == "slice":
            part.copy_(x.narrow(dim, x.shape[dim] - half, half))
        elif form == "slice_scaled":
            part *= 0.5
            y += part.sum()
        elif form == "view":
            y.view(-1).add_(1.0)
        elif form == "transposed":
            y.transpose(0, dim).mul_(2.0)
        elif form == "select":
            y.select(dim, -1).zero_()
        elif form == "masked":
            y.masked_fill_(x < 0, 0.1)
        elif form == "copied":
            z = torch.zeros_like(x)
            z.copy_(y)
            y = z
        elif form == "chained":
            y.sub_(0.5).mul_(x).clamp_(-2.0, 2.0)
        elif form == "zeroed":
            z = x.new_zeros(x.shape)
            z.narrow(dim, 0, half).add_(x.narrow(dim, 0, half))
            y = z
        elif form == "strided":
            y.transpose(0, dim)[::2] = 0.5
        else:
            y.fill_(0.5).add_(x)
        return y


class Kept(nn.Module):
    """A buffer that forward writes and reads: the whole of it, a slice, or a running mean; "alias"
    is two names of one buffer."""

    FORMS = ("row", "index", "mean", "counter", "copy", "alias")

    def __init__(self, xs: Sequence[Tensor], *, form: str):
        super().__init__()
        self.form, x = form, xs[0]
        # Of its last dtype: a cast would part what is aliased.
        self.register_buffer("state", torch.randn(tuple(x.shape), dtype=torch.float64))
        self.state: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("other", self.state if form == "alias" else None)
        self.count: Tensor
        self.other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.form == "row":
                self.state[..., 0] = x[..., -1]
            elif self.form == "index":
                self.state[torch.arange(1)] = x[-1:]
            elif self.form == "mean":
                self.state.mul_(0.9).add_(x, alpha=0.1)
            elif self.form == "copy":
                self.state.copy_(x * 2.0)
            elif self.form == "alias":
                self.state.mul_(0.5)
                self.other.add_(x)
            self.count += 1
        return x + self.state * self.count
