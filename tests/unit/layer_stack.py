"""A stack of equal layers, each with a place for what makes it differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS = 8, 4


class Layer(nn.Module):
    """A layer with a hook for what makes it differ."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def change(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.change(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module] = Layer, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that all layers get what has a gradient
        self.layers = nn.ModuleList(kind(i) for i in range(layers))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x
