"""A decoder in which nothing divides: 6 heads on 3 key heads, packed in unequal parts, an inner
width of 37, 61 tokens of which 7 are given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.common import BATCH, Case

WIDTH, HEADS, KEYS, SIZE, INNER, VOCAB, SEQ = 40, 6, 3, 8, 37, 61, 7


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEYS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(self.norm_1(x)).split([HEADS * SIZE, KEYS * SIZE, KEYS * SIZE], -1)
        q, k, v = (y.view(b, s, -1, SIZE).transpose(1, 2) for y in packed)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, s, -1)))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(self.dropout(F.silu(gate) * up))  # type: ignore[no-any-return]


class OddDecoder(nn.Module):
    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.transpose(1, 2), labels), logits


def odd(layers: int, dropout: float) -> Case:
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    return OddDecoder(layers, dropout), {"ids": ids, "labels": ids.roll(-1, 1)}
