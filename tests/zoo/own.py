"""Models written here: GPT by hand, and PyTorch's own encoder and LSTM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.common import BATCH, INNER, SEQ, VOCAB, WIDTH, Case, tokens


class _Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(SEQ, SEQ).tril().view(1, 1, SEQ, SEQ))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q = q.view(b, t, 4, c // 4).transpose(1, 2)
        k = k.view(b, t, 4, c // 4).transpose(1, 2)
        v = v.view(b, t, 4, c // 4).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (c // 4) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = _Attention(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """GPT as in nanoGPT: packed projection, masked softmax by hand, tied head."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], dtype=torch.long, device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)
        return logits, loss


def nanogpt(layers: int, dropout: float) -> Case:
    ids = tokens()
    return NanoGPT(layers, dropout), {"idx": ids, "targets": ids.clone()}


class EncoderClassifier(nn.Module):
    """``nn.TransformerEncoder`` with a mean-pooled head."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.encoder(x).mean(1))
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}


def encoder(layers: int, dropout: float) -> Case:
    kwargs = {"x": torch.randn(BATCH, SEQ, WIDTH), "y": torch.tensor([0, 3])}
    return EncoderClassifier(layers, dropout), kwargs


class LSTMClassifier(nn.Module):
    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.lstm = nn.LSTM(
            32, WIDTH, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits = self.head(hidden[:, -1])
        return F.cross_entropy(logits, y), logits


def lstm(layers: int, dropout: float) -> Case:
    return LSTMClassifier(layers, dropout), {"tokens": tokens(), "y": torch.tensor([0, 3])}
