"""Mixtures of experts, and products in einsum's letters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(max(shape[-1], 1)))


class Experts(nn.Module):
    """Experts over the last dimension, of ``top`` per token.

    "dense" runs all of them and weighs; "masked" loops over modules and takes each one's tokens by
    a mask; "batched" has their weights in one tensor, "gathered" looks up the weights of each
    token, "one_hot" dispatches by a product.
    """

    FORMS = ("dense", "masked", "batched", "gathered", "one_hot", "added")

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        form: str,
        count: int = 4,
        inner: int = 4,
        top: int = 2,
        normed: bool = True,
    ):
        super().__init__()
        width = xs[0].shape[-1]
        self.form, self.count, self.top, self.normed = form, count, min(top, count), normed
        self.router = nn.Linear(width, count, bias=False)
        if form in ("masked", "added"):
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
                for _ in range(count)
            )
        else:
            self.up, self.down = _weight(count, width, inner), _weight(count, inner, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chances = self.router(flat).softmax(-1)
        best, chosen = chances.topk(self.top, -1)
        if self.normed:
            best = best / best.sum(-1, keepdim=True)
        gates = torch.zeros_like(chances).scatter(-1, chosen, best)
        return self._mixed(flat, gates, best, chosen).reshape(x.shape)

    def _mixed(self, x: Tensor, gates: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
        if self.form == "masked":
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                y = y + expert(x) * gates[:, number, None]
            return y
        if self.form == "added":
            hot = F.one_hot(chosen, self.count).to(x.dtype)
            weights = (hot * best.unsqueeze(-1)).sum(1)
            parts = [expert(x) for expert in self.experts]
            return (torch.stack(parts, 1) * weights.unsqueeze(-1)).sum(1)
        if self.form == "gathered":
            h = F.silu(torch.einsum("nd,nkdi->nki", x, self.up[chosen]))
            return torch.einsum("nki,nkid,nk->nd", h, self.down[chosen], best)
        if self.form == "dense":
            h = F.silu(torch.einsum("nd,edi->nei", x, self.up))
            return torch.einsum("nei,eid,ne->nd", h, self.down, gates)
        if self.form == "one_hot":
            sent = gates.ne(0).to(x.dtype).T.unsqueeze(-1) * x
            h = F.relu(torch.bmm(sent, self.up))
            return (torch.bmm(h, self.down) * gates.T.unsqueeze(-1)).sum(0)
        h = F.gelu(torch.bmm(x.expand(self.count, *x.shape), self.up))
        return (torch.bmm(h, self.down) * gates.T[..., None]).sum(0)


class Einsum(nn.Module):
    """A product with a weight, or of a value with itself, by letters (b, s: batch and sequence, h:
    width, n: heads, d: of a head)."""

    FORMS: Mapping[str, tuple[str, ...]] = {
        "heads": ("bsh,hnd->bsnd", "bsnd,ndh->bsh"),
        "heads_first": ("bsh,ndh->bnsd", "bnsd,hnd->bsh"),
        "outer": ("bsh,bth->bst", "bst,bsh->bth"),
        "linear": ("bsh,bsg->bhg", "bsh,bhg->bsg"),
        "low_rank": ("bsh,hr->bsr", "bsr,rh->bsh"),
        "diagonal": ("bsh,h->bsh",),
        "summed": ("bsh,hr->br",),
        "bilinear": ("bsh,hg,bsg->bs",),
        "implicit": ("bsh,hr",),
    }

    def __init__(self, xs: Sequence[Tensor], *, form: str, inner: int = 4, count: int = 2):
        super().__init__()
        self.form, h = form, xs[0].shape[-1]
        shapes = {
            "heads": ((h, count, inner), (count, inner, h)),
            "heads_first": ((count, inner, h), (h, count, inner)),
            "low_rank": ((h, inner), (inner, h)),
            "diagonal": ((h,),),
            "summed": ((h, inner),),
            "bilinear": ((h, h),),
            "implicit": ((h, inner),),
        }
        self.weights = nn.ParameterList(_weight(*shape) for shape in shapes.get(form, ()))

    def forward(self, x: Tensor) -> Tensor:
        equations, weights = self.FORMS[self.form], list(self.weights)
        if self.form == "bilinear":
            return torch.einsum(equations[0], x, weights[0], x)
        if not weights:
            y = torch.einsum(equations[0], x, x) / x.shape[1]
            second = (y, x) if self.form == "outer" else (x, y)
            return torch.einsum(equations[1], *second)
        for equation, weight in zip(equations, weights, strict=True):
            x = torch.einsum(equation, x, weight)
        return x
