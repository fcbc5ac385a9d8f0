"""The layers that random programs are made of, in the spellings that people use.

Each takes the tensors it will be called on, for their shapes, and its options by keyword.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "swish": lambda x: x * torch.sigmoid(x),
    "squared": lambda x: torch.relu(x).pow(2),
    "softplus": F.softplus,
    "by_hand": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3)))),
    "bump": lambda x: 1.5 - torch.exp(-x * x) / 2,
}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(max(shape[-1], 1)))


class Linear(nn.Module):
    """``x Wᵀ + b`` along the last dimension, in one of its spellings."""

    FORMS = ("module", "function", "matmul", "mm", "einsum", "addmm", "transposed")

    def __init__(self, xs: Sequence[Tensor], *, out: int, bias: bool = True, form: str = "module"):
        super().__init__()
        self.form, width = form, xs[0].shape[-1]
        if form == "module":
            self.inner = nn.Linear(width, out, bias)
        else:
            rows = form in ("function", "transposed")
            self.weight = weight(out, width) if rows else weight(width, out)
            self.bias = weight(out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "module":
            return self.inner(x)  # type: ignore[no-any-return]
        if self.form == "function":
            return F.linear(x, self.weight, self.bias)
        if self.form == "addmm" and self.bias is not None:
            flat = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
            return flat.view(*x.shape[:-1], self.weight.shape[1])
        if self.form in ("mm", "addmm"):
            y = torch.mm(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        elif self.form == "einsum":
            y = torch.einsum(
                "...k,kn->...n" if x.dim() > 3 else _EQUATIONS[x.dim()], x, self.weight
            )
        elif self.form == "transposed":
            y = x @ self.weight.T
        else:
            y = x @ self.weight
        return y if self.bias is None else y + self.bias


_EQUATIONS = {1: "k,kn->n", 2: "mk,kn->mn", 3: "bmk,kn->bmn"}


class Packed(nn.Module):
    """Several projections as one, taken apart; equal thirds or halves unless ``sizes`` says.
    "grouped": in groups of as many as the sizes have in common, with a part of each in a group."""

    FORMS = (
        "split",
        "chunk",
        "slices",
        "narrow",
        "unbind",
        "unflatten",
        "leading",
        "last",
        "grouped",
    )

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        sizes: tuple[int, ...],
        form: str = "split",
        bias: bool = True,
    ):
        super().__init__()
        self.sizes, self.form = sizes, form
        self.proj = nn.Linear(xs[0].shape[-1], sum(sizes), bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, sizes, form = self.proj(x), self.sizes, self.form
        if form in ("chunk", "unbind", "unflatten", "leading", "last") and len(set(sizes)) == 1:
            count, size = len(sizes), sizes[0]
            if form == "chunk":
                return y.chunk(count, dim=-1)  # type: ignore[no-any-return]
            if form == "unbind":
                return y.view(*x.shape[:-1], count, size).unbind(-2)  # type: ignore[no-any-return]
            if form == "unflatten":
                z = y.unflatten(-1, (count, size))
                return tuple(z[..., i, :] for i in range(count))
            if form == "leading":
                z = y.reshape(*x.shape[:-1], count, size)
                z = z.permute(x.dim() - 1, *range(x.dim() - 1), x.dim())
                return tuple(z[i] for i in range(count))
            return y.view(*x.shape[:-1], size, count).unbind(-1)  # type: ignore[no-any-return]
        if form == "grouped":
            groups = math.gcd(*sizes)
            z = y.view(*x.shape[:-1], groups, -1)
            parts = z.split([size // groups for size in sizes], dim=-1)
            return tuple(part.flatten(-2) for part in parts)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        if form == "slices":
            return tuple(y[..., e - s : e] for s, e in zip(sizes, ends, strict=True))
        if form == "narrow":
            return tuple(y.narrow(-1, e - s, s) for s, e in zip(sizes, ends, strict=True))
        return y.split(list(sizes), dim=-1)  # type: ignore[no-any-return]


class Norm(nn.Module):
    FORMS = ("layer", "plain", "rms", "functional_rms", "by_hand", "gemma", "l2", "layer_by_hand")

    def __init__(self, xs: Sequence[Tensor], *, form: str = "layer"):
        super().__init__()
        self.form, width = form, xs[0].shape[-1]
        if form == "layer":
            self.inner: nn.Module = nn.LayerNorm(width)
        elif form == "plain":
            self.inner = nn.LayerNorm(width, elementwise_affine=False)
        elif form == "rms":
            self.inner = nn.RMSNorm(width, eps=1e-2)
        else:
            self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.form in ("layer", "plain", "rms"):
            return self.inner(x)  # type: ignore[no-any-return]
        if self.form == "functional_rms":
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-2)
        if self.form == "l2":
            return self.weight * F.normalize(x + 0.1, dim=-1)
        if self.form == "layer_by_hand":
            centred = x - x.mean(-1, keepdim=True)
            spread = x.var(-1, unbiased=False, keepdim=True)
            return centred / torch.sqrt(spread + 1e-2) * self.weight
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)
        if self.form == "gemma":
            return (x * scale) * (1.0 + self.weight)
        return self.weight * (x * scale)


class Embedding(nn.Module):
    """Token embeddings, with positions or without: learnt, or waves in a buffer."""

    POSITIONS = ("lookup", "slice", "expanded", "buffer", "counted", "waves", "gathered")

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        vocabulary: int,
        width: int,
        positions: str = "",
        padding: int | None = None,
        scaled: bool = False,
    ):
        super().__init__()
        self.positions, self.scale = positions, math.sqrt(width) if scaled else 1.0
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=padding)
        length = xs[0].shape[-1]
        if positions in ("waves", "gathered"):
            angle = torch.outer(torch.arange(length + 3.0), 0.5 ** torch.arange(width))
            self.register_buffer("waves", angle.sin())
            self.waves: Tensor
        elif positions:
            self.places = nn.Embedding(length + 3, width)
        self.register_buffer("ids", torch.arange(length + 3)[None], persistent=False)
        self.ids: Tensor

    @property
    def weight(self) -> Tensor:
        return self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids) * self.scale
        length = ids.shape[-1]
        if self.positions == "lookup":
            x = x + self.places(torch.arange(ids.shape[-1], device=ids.device))
        elif self.positions == "slice":
            x = x + self.places.weight[: ids.shape[-1]]
        elif self.positions == "expanded":
            place = torch.arange(ids.shape[-1]).unsqueeze(0).expand(ids.shape[0], -1)
            x = x + self.places(place)
        elif self.positions == "buffer":
            x = x + self.places(self.ids[:, :length])
        elif self.positions == "counted":
            mask = (ids != 0).long()
            x = x + self.places((mask.cumsum(-1) * mask) + 1)
        elif self.positions == "waves":
            x = x + self.waves[:length]
        elif self.positions == "gathered":
            x = x + self.waves.index_select(0, torch.arange(length) + 2)
        return x


class Lora(nn.Module):
    """A frozen projection with a low-rank correction that learns."""

    def __init__(self, xs: Sequence[Tensor], *, out: int, rank: int, bias: bool = True):
        super().__init__()
        width = xs[0].shape[-1]
        self.base = nn.Linear(width, out, bias).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        inner: int,
        activation: str = "gelu",
        gate: str = "",
        bias: bool = True,
        p: float = 0.0,
    ):
        super().__init__()
        width = xs[0].shape[-1]
        self.gate, self.activation = gate, ACTIVATIONS[activation]
        self.up = nn.Linear(width, inner * (2 if gate in ("chunk", "split") else 1), bias)
        if gate == "apart":
            self.side = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.gate in ("chunk", "split"):
            half = y.shape[-1] // 2
            g, u = y.chunk(2, -1) if self.gate == "chunk" else y.split(half, -1)
            y = self.activation(g) * u
        elif self.gate == "apart":
            y = self.activation(y) * self.side(x)
        else:
            y = self.activation(y)
        return self.dropout(self.down(y))  # type: ignore[no-any-return]
