"""Attention of many kinds, which differ in how heads are packed, grouped and biased."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, WIDTH, HEADS = 2, 6, 16, 4


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """(batch, sequence, width) to (batch, head, sequence, width per head)."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """Undo :func:`heads`."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def distances(length: int) -> Tensor:
    """How far column j is right of row i."""
    place = torch.arange(length)
    return place[None] - place[:, None]


class Separate(nn.Module):
    """The four projections that most kinds below share."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.v, self.o = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return heads(self.q(x)), heads(self.k(x)), heads(self.v(x))


class Packed(nn.Module):
    """One projection for q, k and v, whose ``rows`` the kinds below lay out differently."""

    def __init__(self, rows: int = 3 * WIDTH, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, rows, bias), nn.Linear(WIDTH, WIDTH)


class AlibiBuffer(Packed):
    """Slopes per head come from a buffer, so the buffer is to be sharded with the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))
        self.slopes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        length = x.shape[1]
        bias = self.slopes.view(1, HEADS, 1, 1) * torch.arange(length).view(1, 1, 1, length)
        return self.o(merge((q @ k.mT / 2 + bias).softmax(-1) @ v))  # type: ignore[no-any-return]


class AlibiInside(Separate):
    """Slopes per head are computed in forward, from a range that no weight shards."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        length = x.shape[1]
        slopes = torch.pow(2.0, -torch.arange(1, HEADS + 1, dtype=x.dtype))
        bias = slopes[:, None, None] * distances(length).clamp(max=0)
        mask = torch.full((length, length), float("-inf")).triu(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(bias + mask)[None])
        return self.o(merge(y))  # type: ignore[no-any-return]


class RelativeEmbedding(Packed):
    """A bias per head is the last axis of an embedding, moved to the heads by a permute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * SEQ, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(x).split(WIDTH, -1))
        bias = self.table(SEQ - distances(x.shape[1])).permute(2, 0, 1)[None]
        return self.o(merge((q @ k.mT + bias).softmax(-1) @ v))  # type: ignore[no-any-return]


class SwinWindow(Packed):
    """A bare parameter is indexed for the bias; q, k, v are an axis of their own, put first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(25, HEADS))
        self.register_buffer("places", torch.randint(0, 25, (9, 9)))
        self.places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        packed = self.qkv(x).reshape(b, s, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = packed[0], packed[1], packed[2]
        bias = self.table[self.places.view(-1)].view(9, 9, -1).permute(2, 0, 1).contiguous()
        chances = (q @ k.transpose(-2, -1) + bias[None]).softmax(-1)
        return self.o((chances @ v).transpose(1, 2).reshape(b, s, w))  # type: ignore[no-any-return]


class NeoxPacked(Packed):
    """Rows go head by head, q, k, v within each head."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        packed = self.qkv(x).view(b, s, HEADS, 3 * w // HEADS)
        q, k, v = packed.transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(merge(y))  # type: ignore[no-any-return]


class FalconPacked(Packed):
    """Rows go group by group: the group's queries, its key, its value, cut out by slices."""

    def __init__(self) -> None:
        super().__init__(2 * 4 * 4)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(x).view(b, s, 2, 4, 4)
        query = packed[..., :-2, :]
        key = packed[..., -2:-1, :].expand(b, s, 2, 2, 4)
        value = packed[..., -1:, :].expand(b, s, 2, 2, 4)
        q, k, v = (part.reshape(b, s, 4, 4).transpose(1, 2) for part in (query, key, value))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v)))  # type: ignore[no-any-return]


class GroupedQuery(nn.Module):
    """8 heads on 2 of k and v, repeated inside the attention op."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x), 8), heads(self.k(x), 2), heads(self.v(x), 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(merge(y))  # type: ignore[no-any-return]


class MultiQuery(nn.Module):
    """One head of k and v cannot be sharded, but its gradient comes from sharded queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.kv = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).split(4, -1)
        y = F.scaled_dot_product_attention(heads(self.q(x), 8), k[:, None], v[:, None])
        return self.o(merge(y))  # type: ignore[no-any-return]


class KVCache(Separate):
    """Buffers take k and v in place, by an index and by ``index_copy_``, and one is read back."""

    def __init__(self) -> None:
        super().__init__()
        shape = (BATCH, HEADS, 10, WIDTH // HEADS)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))
        self.keys: Tensor
        self.values: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        place = torch.arange(x.shape[1])
        with torch.no_grad():
            self.keys[:, :, place] = k
            self.values.index_copy_(2, place, v)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(merge(y)) + self.keys.sum() * 0.1  # type: ignore[no-any-return]


class NormedHeads(Separate):
    """A norm within each head of q, and one across all heads of k."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q(x).unflatten(-1, (HEADS, -1))).transpose(1, 2)
        k = heads(self.k_norm(self.k(x)))
        y = F.scaled_dot_product_attention(q, k, heads(self.v(x)), is_causal=True)
        return self.o(merge(y))  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    """Two sequences of different lengths; k and v share a projection that q does not."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        y = F.scaled_dot_product_attention(heads(self.q(x)), heads(k), heads(v))
        return self.o(merge(y)) + x  # type: ignore[no-any-return]


class PaddingMask(Separate):
    """A boolean input masks keys before the softmax and rows after the attention."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.project(x)
        bias = torch.zeros(b, 1, s, s).masked_fill(~mask[:, None, None, :], -1e9)
        y = (q @ k.mT + bias).softmax(-1) @ v
        return self.o(merge(y)) * mask[..., None]  # type: ignore[no-any-return]


class LinearAttention(Packed):
    """No softmax: running sums along the sequence, and a product of three tensors at once."""

    def __init__(self) -> None:
        super().__init__(bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
        scale = 1 / (q * k.cumsum(2)).sum(-1)
        y = torch.einsum("bhnd,bhnde,bhn->bhne", q, state, scale)
        return self.o(merge(y))  # type: ignore[no-any-return]


class BiasedAttention(Separate):
    """Attention to which the bias is given."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.o(merge((q @ k.mT + bias).softmax(-1) @ v))  # type: ignore[no-any-return]


class SharedRelativeBias(nn.Module):
    """T5: one embedding gives the bias of all layers, so its gradient is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, HEADS)
        self.layers = nn.ModuleList(BiasedAttention(bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table(distances(x.shape[1]).abs().clamp(max=7)).permute(2, 0, 1)[None]
        for layer in self.layers:
            x = x + layer(x, bias)
        return x


class RotaryByPosition(Separate):
    """Angles are looked up by an input of positions; even and odd elements turn together."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(10, 2))
        self.angles: Tensor

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.angles.cos()[positions][:, None], self.angles.sin()[positions][:, None]

        def turned(t: Tensor) -> Tensor:
            even, odd = t[..., 0::2], t[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        q, k, v = self.project(x)
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.o(merge(y))  # type: ignore[no-any-return]
