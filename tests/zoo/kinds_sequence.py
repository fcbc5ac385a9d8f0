"""Scans and running ops along the sequence, and whole layers of PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.kinds_attention import HEADS, WIDTH


class RunningOps(nn.Module):
    """Running sums along the sequence; the largest along the sharded width, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        total, best = h.cumsum(1), h.topk(3, -1)
        y = self.down(total.tanh()) + x
        return y, best.values, best.indices, h.argmax(-1), total.logcumsumexp(-1)


class Mamba(nn.Module):
    """A selective scan, step by step: depthwise convolution, a state of two axes per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)
        self.conv = nn.Conv1d(32, 32, 3, groups=32, padding=2)
        self.select, self.step = nn.Linear(32, 2 + 8), nn.Linear(2, 32)
        self.log_decay = nn.Parameter(torch.randn(32, 4))
        self.skip = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        u, gate = self.up(x).chunk(2, -1)
        u = F.silu(self.conv(u.mT)[..., :s].mT)
        step, inward, outward = self.select(u).split([2, 4, 4], -1)
        step = F.softplus(self.step(step))
        decay = -torch.exp(self.log_decay)
        state, ys = torch.zeros(b, 32, 4), []
        for t in range(s):
            kept = state * torch.exp(step[:, t, :, None] * decay)
            state = kept + step[:, t, :, None] * inward[:, t, None] * u[:, t, :, None]
            ys.append((state * outward[:, t, None]).sum(-1))
        y = torch.stack(ys, 1) + u * self.skip
        return self.down(y * F.silu(gate))  # type: ignore[no-any-return]


class GRULoop(nn.Module):
    """A cell in a loop: packed gates, and a state that starts as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.o = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = torch.zeros(x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return self.o(torch.stack(ys, 1))  # type: ignore[no-any-return]


class BidirectionalLSTM(nn.Module):
    """Two layers, both ways, as one op, whose last states are outputs too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 32, 2, batch_first=True, bidirectional=True)
        self.o = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (hidden, cell) = self.lstm(x)
        return self.o(y), hidden.sum() + cell.sum()


class PooledEncoder(nn.Module):
    """Token ids to one row per sequence: masked mean, first row and maximum, of the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(12, WIDTH), nn.Embedding(10, WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 32, 0.0, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))[None]
        x = self.layer(x)
        mask = (ids != 0).unsqueeze(-1)
        mean = (x * mask).sum(1) / mask.sum(1)
        pooled = torch.cat([mean, x[:, 0], x.amax(1)], -1)
        return self.head(pooled[:, :WIDTH])  # type: ignore[no-any-return]


class TorchAttention(nn.Module):
    """PyTorch's own attention, with a learnt key and value more, and the mean weights returned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(x, x, x, need_weights=True)
        return self.norm(x + y), weights


class TorchDecoder(nn.Module):
    """PyTorch's own decoder layer: a causal mask made in forward, and a memory of 5 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(
            WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)  # type: ignore[no-any-return]
