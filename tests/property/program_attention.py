"""Attention as random programs have it: projections, heads, positions, masks and caches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.property.program_layers import Norm


class Attention(nn.Module):
    """Self-attention (or to a second input), by heads.

    ``bias``: what is added to the scores, "alibi" (slopes made in forward, or a buffer) or
    "table" (learnt, by relative position). ``cache``: keys and values go through a buffer, written
    by index or as a slice.
    """

    CORES = ("sdpa", "causal", "masked", "bool_masked", "softmax", "softmax_causal", "einsum")
    PROJECTIONS = ("apart", "split", "chunk", "unbind", "heads_first", "grouped")
    GROUPS = ("repeat", "expand", "sdpa")
    ADDED = ("alibi", "alibi_buffer", "table")
    CACHES = ("index", "slice", "copy")
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
        added: str = "",
        cache: str = "",
    ):
        super().__init__()
        x, self.length = xs[0], xs[0].shape[1]
        self.heads, self.kv_heads, self.d, self.p = heads, kv_heads, d, p
        self.core, self.projection, self.group, self.view = core, projection, group, view
        width = x.shape[-1]
        self.added, self.cache = added, cache
        packs_groups = projection in ("split", "grouped")
        if projection == "apart" or (kv_heads != heads and not packs_groups) or len(xs) > 1:
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
        self.register_buffer("slopes", 2.0 ** -(1.0 + torch.arange(heads)))
        width_of_table = self.length + xs[-1].shape[1]
        if added == "table":
            self.table = nn.Embedding(width_of_table, heads)
        if cache:
            room = (x.shape[0], kv_heads, xs[-1].shape[1] + 2, d)
            self.register_buffer("keys", torch.randn(room))
            self.register_buffer("values", torch.randn(room))
        self.cos: Tensor
        self.sin: Tensor
        self.turn: Tensor
        self.mask: Tensor
        self.slopes: Tensor
        self.keys: Tensor
        self.values: Tensor

    def _project(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, length, d] each."""
        b, h, g, d = x.shape[0], self.heads, self.kv_heads, self.d
        if self.projection == "apart":
            q, k, v = self.q(x), self.k(y), self.v(y)
        elif self.projection == "split":
            q, k, v = self.qkv(x).split([h * d, g * d, g * d], dim=-1)
        elif self.projection == "chunk":
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        elif self.projection == "grouped":
            packed = self.qkv(x).view(b, -1, g, h // g + 2, d)
            q, k, v = packed[..., :-2, :], packed[..., -2, :], packed[..., -1, :]
            return q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
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

    def _cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache holds once these are in it; its last rows are of the past."""
        length = k.shape[2]
        places = torch.arange(length)
        with torch.no_grad():
            if self.cache == "index":
                self.keys[:, :, places] = k
                self.values[:, :, places] = v
            elif self.cache == "copy":
                self.keys.index_copy_(2, places, k)
                self.values.index_copy_(2, places, v)
            else:
                self.keys[:, :, :length] = k
                self.values[:, :, :length].copy_(v)
        past = self.values[:, :, 1 : length + 1].clone()  # a second call writes it again
        return k + self.keys[:, :, :length], v * past

    def _bias(self, q: Tensor, k: Tensor) -> Tensor:
        """[heads, queries, keys]"""
        far = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
        if self.added == "table":
            bias: Tensor = self.table(far + q.shape[2] - 1)
            return bias.permute(2, 0, 1)
        if self.added == "alibi":
            return far * (2.0 ** -(1.0 + torch.arange(self.heads, dtype=q.dtype)))[:, None, None]
        return self.slopes[:, None, None] * far

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
        if self.cache:
            k, v = self._cached(k, v)
        k, v = self._grouped(k), self._grouped(v)
        attended = self._attend(q, k, v).transpose(1, 2)
        return self.o(attended.reshape(x.shape[0], x.shape[1], -1))  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.p if self.training else 0.0
        if self._fused():
            mask = {"masked": self.mask, "bool_masked": self.mask < 1.0}.get(self.core)
            if self.core == "bool_masked":
                mask = (self.mask < 1.0) | torch.eye(*self.mask.shape, dtype=torch.bool)
            if self.added and self.core in ("sdpa", "masked"):
                bias = self._bias(q, k)[None]
                mask = bias if mask is None else mask + bias
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
        if self.added:
            scores = scores + self._bias(q, k)
        if self.core == "softmax_causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), p, self.training) @ v


class Padded(nn.Module):
    """Attention, or pooling, of [batch, sequence, width] where a mask [batch, sequence] says which
    tokens count; the first always does."""

    FORMS = ("bool", "added", "filled", "pooled", "zeroed", "chosen")

    def __init__(self, xs: Sequence[Tensor], *, form: str, heads: int = 2, d: int = 2):
        super().__init__()
        self.form, self.heads, self.d, width = form, heads, d, xs[0].shape[-1]
        if form in ("bool", "added", "filled"):
            self.qkv, self.o = nn.Linear(width, 3 * heads * d), nn.Linear(heads * d, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask | (torch.arange(mask.shape[1]) == 0)
        if self.form == "pooled":
            return (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        if self.form == "zeroed":
            return x.masked_fill(~mask[..., None], 0.0).cumsum(1)
        if self.form == "chosen":
            last = mask.long().cumsum(1).argmax(1)
            return x[torch.arange(x.shape[0]), last]
        packed = self.qkv(x).unflatten(-1, (3, self.heads, self.d)).permute(2, 0, 3, 1, 4)
        q, k, v = packed.unbind(0)
        seen = mask[:, None, None, :]
        if self.form == "filled":
            scores = (q @ k.mT).masked_fill(~seen, -math.inf)
            y = scores.softmax(-1) @ v
        else:
            bias = seen if self.form == "bool" else (1.0 - seen.to(x.dtype)) * -1e9
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
