"""Layers of many kinds: experts, convolutions, norms, weights used in odd ways, losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.kinds_attention import WIDTH


class UpDown(nn.Module):
    """Two Linears, between which the kinds below do something that a split can break."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)


class ConvNet(nn.Module):
    """Norms over the batch and over groups of channels, around a grouped strided convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.batch_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, groups=2)
        self.group_norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.batch_norm(self.stem(x))), 2)
        x = F.gelu(self.group_norm(self.grouped(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def residual_convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
    )


class ResNet(nn.Module):
    """Residual sums over channels, with activations in place and norms that keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(residual_convolutions() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu_(block(x) + x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


class DiffusionBlock(nn.Module):
    """Between two convolutions with biases: an embedding of the time added to the channels, and a
    norm over groups of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.time = nn.Conv2d(8, 16, 3, padding=1), nn.Linear(WIDTH, 16)
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.into(x) + self.time(time)[:, :, None, None]
        return x + self.out(F.silu(self.norm(h)))  # type: ignore[no-any-return]


class Bags(nn.Module):
    """Bags of categories, whose vectors meet in products with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(12, 16) for _ in range(3))
        self.up, self.head = nn.Linear(WIDTH, 16), nn.Linear(16 + 6, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        bags = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        vectors = torch.stack([self.up(x), *bags], 1)
        pairs = torch.bmm(vectors, vectors.mT)
        rows, columns = torch.tril_indices(4, 4, -1)
        features = torch.cat([vectors[:, 0], pairs[:, rows, columns]], 1)
        return self.head(features).squeeze(-1)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A gate, and the weights of 4 experts stacked along their first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(4, 24, WIDTH) / 4)


class DenseExperts(Experts):
    """Every token goes to every expert, by einsums with an axis of experts."""

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        h = torch.einsum("bsd,edf->bsef", x, self.up).relu()
        y = torch.einsum("bsef,efd->bsed", h, self.down)
        return torch.einsum("bse,bsed->bsd", chances, y)


class TopExperts(Experts):
    """The gate's best two are scattered into weights; tokens broadcast over a batched product."""

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        best, index = chances.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(chances).scatter(-1, index, best)
        h = torch.matmul(x.reshape(-1, WIDTH)[None], self.up).relu()
        y = torch.matmul(h, self.down)
        return (y * weights.reshape(-1, 4).t()[..., None]).sum(0).view_as(x)


class TurnsInGate(UpDown):
    """Gates and values take turns along one axis, of which they are every second element."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(x)
        gate, value = both[..., ::2], both[..., 1::2]
        return self.down(gate.sigmoid() * value)  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """LoRA: all but a low-rank pair is frozen, norm included, and the pair's inner width is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for frozen in (self.norm, self.up, self.down):
            frozen.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h) + self.b(self.a(h)) * 2))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One module under two names, its weight under a third, and one buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.arange(float(WIDTH)))
        self.shift: Tensor
        self.register_buffer("same_shift", self.shift)
        self.same_shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.first(x) + self.shift).relu()
        return self.last(h + self.same_shift)  # type: ignore[no-any-return]


class TransposedWeight(nn.Module):
    """One parameter is a weight, a transposed weight, and multiplied by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, self.table).relu()
        return self.last(h @ self.table), self.table.t() @ self.table


class GatedNorm(nn.Module):
    """A root mean square over the sharded width, then a weight and a gate along it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.weight, self.down = nn.Parameter(torch.randn(32)), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return self.down(h * F.silu(self.gate(x)))  # type: ignore[no-any-return]


class Inplace(UpDown):
    """Slices of the sharded width are changed in place, and so are rows of the output."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h[..., :8].mul_(2)
        h[..., 8:] += 1
        y: Tensor = self.down(F.relu(h, inplace=True))
        y.add_(x)
        y[:, 0] = 0
        return y


class UnevenSplit(UpDown):
    """The inner width is split into unequal parts and put together in another order."""

    def __init__(self) -> None:
        super().__init__(24)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).split([8, 12, 4], -1)
        return self.down(torch.cat([c.relu(), a.tanh(), b * 2], -1))  # type: ignore[no-any-return]


class ChannelShuffle(UpDown):
    """The inner width is read as 4 × 6 and transposed, so its outer part becomes the inner one."""

    def __init__(self) -> None:
        super().__init__(24)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.up(x).view(b, s, 4, 6).transpose(-1, -2).reshape(b, s, 24)
        return self.down(h.relu())  # type: ignore[no-any-return]


class PatchMerging(nn.Module):
    """The sequence is a grid whose 2 × 2 patches are folded into the width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        patches = self.up(x).view(b, 2, 2, 2, 2, WIDTH).permute(0, 1, 3, 2, 4, 5)
        return self.down(patches.reshape(b, 4, 4 * WIDTH).relu())  # type: ignore[no-any-return]


class SequenceBatchNorm(UpDown):
    """Statistics over batch and sequence, flattened, of a sharded width, with running buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x).flatten(0, 1)).view(x.shape[0], x.shape[1], 32)
        return self.down(h.relu())  # type: ignore[no-any-return]


class NormedWeight(nn.Module):
    """A weight is computed from two parameters: a direction over its norm, and a length."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(32, WIDTH))
        self.length = nn.Parameter(torch.randn(32, 1))
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        return self.down(F.linear(x, weight).relu())  # type: ignore[no-any-return]


class ManyLosses(UpDown):
    """Means, sums, a norm and deviations over everything: all outputs are scalars."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        y = self.down(self.up(x).relu())
        square = (y - target).pow(2).sum(-1).mean()
        smooth = F.smooth_l1_loss(y, target, reduction="sum")
        return square, smooth, (y * target).norm(), y.std(), y.var(0).sum()
