"""The models of the golden tests. Dumps name these lines: add at the end."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        y: Tensor = x + self.down(h)
        return y


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Residual() for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x))
        return y.mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).split(d, dim=2)
        q = q.view(b, s, 4, 4).transpose(1, 2)
        k = k.view(b, s, 4, 4).transpose(1, 2)
        v = v.view(b, s, 4, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + F.dropout(self.out(y.transpose(1, 2).reshape(b, s, d)), 0.1)


def mlp() -> tuple[nn.Module, Tensor]:
    return Mlp(), torch.randn(2, 4, 8)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.randn(2, 4, 16)


class Language(nn.Module):
    """A tied table; the loss alone is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(24, 8, padding_idx=0), nn.LayerNorm(8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.tokens(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def language() -> tuple[nn.Module, Tensor]:
    return Language(), torch.randint(24, (2, 5))


class Dropouts(nn.Module):
    """All kinds but the plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout1d(x * self.scale, 0.5)
        y = F.feature_alpha_dropout(F.alpha_dropout(y, 0.25, True), 0.25, True)
        z, kept = torch.native_dropout(y, 0.5, True)
        return torch.native_dropout(z, 0.5, True)[0] * kept


class DroppingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(torch.relu(self.up(x)), 0.25)), 0.5)


class DroppingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(DroppingLayer(), DroppingLayer())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(F.dropout(x, 0.5))
        return y


def dropouts() -> tuple[nn.Module, Tensor]:
    return Dropouts(), torch.randn(4, 8, 3)


def dropping_layers() -> tuple[nn.Module, Tensor]:
    return DroppingLayers(), torch.randn(2, 4, 8)


class Speller(nn.Module):
    """A recurrence between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        out: Tensor = self.head(y)
        return out


def speller() -> tuple[nn.Module, Tensor]:
    return Speller(), torch.randn(2, 4, 8)


class StepSpeller(nn.Module):
    """The same, by a cell that is called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 6)
        self.head = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, states = None, []
        for letter in x.unbind(1):
            h = self.cell(letter, h)
            states.append(h)
        out: Tensor = self.head(torch.stack(states, 1))
        return out


def step_speller() -> tuple[nn.Module, Tensor]:
    return StepSpeller(), torch.randn(2, 3, 8)
