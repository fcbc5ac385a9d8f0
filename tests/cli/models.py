"""Models for the tests of the command line."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.odd import SEQ, VOCAB, OddDecoder

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def mlp() -> Call:
    return nn.Sequential(Layer(), Layer()), (torch.randn(2, 4, 8),), {}


class Declared(nn.Linear):
    """Has inputs of its own, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__(8, 16)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"input": torch.ones(2, 8)}


def no_inputs() -> nn.Module:
    return nn.Linear(8, 16)


ready = Declared()


def uneven() -> Call:
    """Nothing that two ranks could share evenly."""
    ids = torch.randint(VOCAB, (1, SEQ))
    return OddDecoder(2, 0.1), (ids, ids.roll(-1, 1)), {}


def odd() -> Call:
    """No size that eight ranks could share."""
    return nn.Linear(3, 5), (torch.randn(7, 3),), {}


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.linalg.qr(self.up(x)).Q)
        return y


def opaque() -> Call:
    return Opaque(), (torch.randn(16, 8),), {}


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def data_dependent() -> Call:
    return Branch(), (torch.ones(3),), {}


def wrong_argument() -> Call:
    return nn.Linear(8, 16), (), {"inputs": torch.ones(2, 8)}


def raises() -> Call:
    raise ValueError("no weights here")


def exits() -> Call:
    raise SystemExit(3)


def returns_text() -> str:
    return "model"


def returns_pair() -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 16), torch.ones(2, 8)


def needs_size(size: int) -> nn.Module:
    return nn.Linear(size, size)


_private = 3


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.dropout(torch.relu(self.up(self.norm(x))), 0.5))
        return F.dropout(y, 0.5)


def dropping() -> Call:
    return Dropping(), (torch.randn(2, 4, 8),), {}


class Speller(nn.Module):
    def __init__(self, projection: int = 0) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 64, proj_size=projection)
        with torch.no_grad():
            weight: Tensor = self.rnn.weight_hh_l0  # type: ignore[assignment]
            weight *= torch.rand_like(weight) < 0.1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x)[0]
        return y


def pruned() -> Call:
    return Speller(), (torch.randn(3, 4, 8),), {}


def projected() -> Call:
    return Speller(16), (torch.randn(3, 4, 8),), {}


def layers() -> Call:
    """Four equal layers."""
    return nn.Sequential(*(Layer() for _ in range(4))), (torch.randn(2, 4, 8),), {}
