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
    """Several projections as one, taken apart; equal thirds or halves unless ``sizes`` says."""

    FORMS = ("split", "chunk", "slices", "narrow", "unbind", "unflatten", "leading", "last")

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
    """Token embeddings, with learned positions or without."""

    def __init__(self, xs: Sequence[Tensor], *, vocabulary: int, width: int, positions: str = ""):
        super().__init__()
        self.positions = positions
        self.tokens = nn.Embedding(vocabulary, width)
        if positions:
            self.places = nn.Embedding(xs[0].shape[-1] + 3, width)

    @property
    def weight(self) -> Tensor:
        return self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids)
        if self.positions == "lookup":
            x = x + self.places(torch.arange(ids.shape[-1], device=ids.device))
        elif self.positions == "slice":
            x = x + self.places.weight[: ids.shape[-1]]
        elif self.positions == "expanded":
            place = torch.arange(ids.shape[-1]).unsqueeze(0).expand(ids.shape[0], -1)
            x = x + self.places(place)
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


class Attention(nn.Module):
    """Self-attention (or to a second input), by heads, written in one of three ways."""

    CORES = ("sdpa", "causal", "masked", "bool_masked", "softmax", "softmax_causal", "einsum")
    PROJECTIONS = ("apart", "split", "chunk", "unbind", "heads_first")
    GROUPS = ("repeat", "expand", "sdpa")
    VIEWS = ("view", "reshape", "unflatten")

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        heads: int,
        kv_heads: int,
        d: int,
        core: str = "sdpa",
        projection: str = "apart",
        group: str = "repeat",
        view: str = "view",
        norm: str = "",
        rotary: str = "",
        bias: bool = True,
        p: float = 0.0,
    ):
        super().__init__()
        x, self.length = xs[0], xs[0].shape[1]
        self.heads, self.kv_heads, self.d, self.p = heads, kv_heads, d, p
        self.core, self.projection, self.group, self.view = core, projection, group, view
        width = x.shape[-1]
        if projection == "apart" or (kv_heads != heads and projection != "split") or len(xs) > 1:
            self.projection = "apart"
            self.q = nn.Linear(width, heads * d, bias)
            self.k = nn.Linear(xs[-1].shape[-1], kv_heads * d, bias)
            self.v = nn.Linear(xs[-1].shape[-1], kv_heads * d, bias)
        else:
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * d, bias)
        self.o = nn.Linear(heads * d, width, bias)
        self.q_norm = Norm([x.new_zeros(d)], form=norm) if norm else None
        self.k_norm = Norm([x.new_zeros(d)], form=norm) if norm else None
        self.rotary = rotary if d % 2 == 0 else ""
        angle = torch.outer(torch.arange(x.shape[1]), 0.3 ** torch.arange(max(d // 2, 1)))
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin())
        self.register_buffer("turn", torch.polar(torch.ones_like(angle), angle))
        self.register_buffer("mask", torch.randn(self.length, xs[-1].shape[1]))
        self.cos: Tensor
        self.sin: Tensor
        self.turn: Tensor
        self.mask: Tensor

    def _project(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, length, d] each."""
        b, h, g, d = x.shape[0], self.heads, self.kv_heads, self.d
        if self.projection == "apart":
            q, k, v = self.q(x), self.k(y), self.v(y)
        elif self.projection == "split":
            q, k, v = self.qkv(x).split([h * d, g * d, g * d], dim=-1)
        elif self.projection == "chunk":
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        elif self.projection == "unbind":
            packed = self.qkv(x).view(b, -1, 3, h, d).permute(2, 0, 3, 1, 4)
            return packed.unbind(0)  # type: ignore[no-any-return]
        else:
            packed = self.qkv(x).view(b, -1, h, 3 * d).transpose(1, 2)
            return packed.chunk(3, dim=-1)  # type: ignore[no-any-return]
        return self._heads(q, h), self._heads(k, g), self._heads(v, g)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        if self.view == "unflatten":
            return x.unflatten(-1, (heads, self.d)).transpose(1, 2)  # type: ignore[no-any-return]
        if self.view == "reshape":
            return x.reshape(*x.shape[:-1], heads, self.d).permute(0, 2, 1, 3)
        return x.view(x.shape[0], -1, heads, self.d).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        if self.rotary == "half":
            a, b = x[..., : self.d // 2], x[..., self.d // 2 :]
            return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin
        if self.rotary == "complex":
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * self.turn).flatten(-2)
        return x

    def _grouped(self, x: Tensor) -> Tensor:
        times = self.heads // self.kv_heads
        if times == 1 or (self.group == "sdpa" and self._fused()):
            return x
        if self.group == "expand":
            b, g, s, d = x.shape
            return x[:, :, None].expand(b, g, times, s, d).reshape(b, g * times, s, d)
        return x.repeat_interleave(times, dim=1)

    def _fused(self) -> bool:
        return self.core in ("sdpa", "causal", "masked", "bool_masked")

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        q, k, v = self._project(x, x if y is None else y)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if y is None:
            q, k = self._turned(q), self._turned(k)
        k, v = self._grouped(k), self._grouped(v)
        attended = self._attend(q, k, v).transpose(1, 2)
        return self.o(attended.reshape(x.shape[0], x.shape[1], -1))  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.p if self.training else 0.0
        if self._fused():
            mask = {"masked": self.mask, "bool_masked": self.mask < 1.0}.get(self.core)
            if self.core == "bool_masked":
                mask = (self.mask < 1.0) | torch.eye(*self.mask.shape, dtype=torch.bool)
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=p,
                is_causal=self.core == "causal",
                enable_gqa=q.shape[1] != k.shape[1],
            )
        if self.core == "einsum":
            scores = torch.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(self.d)
            chances = F.dropout(scores.softmax(-1), p, self.training)
            return torch.einsum("bhst,bhtd->bhsd", chances, v)
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.d**-0.5
        if self.core == "softmax_causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), p, self.training) @ v
