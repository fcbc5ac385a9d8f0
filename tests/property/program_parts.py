"""The parts that random programs are made of: layers, and small ops on one value or more.

Each takes the tensors it will be called on, for their shapes, and its options by keyword.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.property.program_attention import Attention, Padded
from tests.property.program_experts import Einsum, Experts
from tests.property.program_images import Image, Signal
from tests.property.program_indexing import Indexed, InPlace, Kept, Running
from tests.property.program_layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    Lora,
    Mlp,
    Norm,
    Packed,
)
from tests.property.program_losses import Loss, PairLoss


class Activation(nn.Module):
    def __init__(self, xs: Sequence[Tensor], *, name: str):
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Dropout(nn.Module):
    """Dropout of elements, of whole channels, and other random numbers."""

    FORMS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
        "plain": lambda x, p: F.dropout(x, p),
        "channels": lambda x, p: F.dropout1d(x, p),
        "alpha": lambda x, p: F.alpha_dropout(x, p, training=True),
        "twice": lambda x, p: F.dropout(x, p) + F.dropout(x, p),
        "noise": lambda x, p: x + p * torch.rand_like(x),
        "normal": lambda x, p: x * (1.0 + p * torch.randn_like(x)),
    }

    def __init__(self, xs: Sequence[Tensor], *, p: float, form: str = "plain"):
        super().__init__()
        self.function, self.p = self.FORMS[form], p

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.p) if self.training else x


class Pair(nn.Module):
    """Two values of shapes that broadcast."""

    FORMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - 0.7 * y,
        "scaled": lambda x, y: torch.add(x, y, alpha=2),
        "mul": lambda x, y: x * torch.tanh(y),
        "gate": lambda x, y: F.silu(x) * y,
        "div": lambda x, y: x / (1.0 + y * y),
        "mix": lambda x, y: torch.where(x > y, 2.0 * x, y),
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    }

    def __init__(self, xs: Sequence[Tensor], *, form: str):
        super().__init__()
        self.function = self.FORMS[form]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


class Sum(nn.Module):
    """Three values or more of one shape."""

    def forward(self, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total

    def __init__(self, xs: Sequence[Tensor]):
        super().__init__()


def _written(x: Tensor, n: int) -> Tensor:
    y = x.clone()
    y[..., :n] = 0.5
    y[..., n:] *= 2.0
    return y


def _full_rank(x: Tensor) -> Tensor:
    """With the identity below: the gradient of a decomposition needs columns that are apart."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype).expand(*x.shape[:-2], -1, -1)
    return torch.cat([x, identity], -2)


class Shaped(nn.Module):
    """An op without parameters; ``dim`` counts from the end."""

    FORMS: Mapping[str, Callable[[Tensor, int, int], Any]] = {
        "transpose": lambda x, dim, n: x.transpose(dim, dim - 1),
        "swap": lambda x, dim, n: x.swapaxes(dim, -1),
        "permute": lambda x, dim, n: x.permute(*range(1, x.dim()), 0),
        "flatten": lambda x, dim, n: x.flatten(dim - 1, dim),
        "merge": lambda x, dim, n: x.reshape(-1, x.shape[-1]),
        "all": lambda x, dim, n: x.reshape(-1),
        "unflatten": lambda x, dim, n: x.unflatten(dim, (n, -1)),
        "unflatten_inner": lambda x, dim, n: x.unflatten(dim, (-1, n)),
        "regroup": lambda x, dim, n: x.reshape(n, -1),
        "unsqueeze": lambda x, dim, n: x.unsqueeze(dim),
        "squeeze": lambda x, dim, n: x.squeeze(),
        "chunk": lambda x, dim, n: x.chunk(n, dim),
        "split_first": lambda x, dim, n: x.split([n, x.shape[dim] - n], dim),
        "unbind": lambda x, dim, n: x.unbind(dim)[:3],
        "first": lambda x, dim, n: x.narrow(dim, 0, n),
        "shifted": lambda x, dim, n: x.narrow(dim, x.shape[dim] - n, n),
        "tail": lambda x, dim, n: x.transpose(0, dim)[n:].transpose(0, dim),
        "strided": lambda x, dim, n: x.transpose(0, dim)[::n].transpose(0, dim),
        "select": lambda x, dim, n: x.select(dim, n),
        "last": lambda x, dim, n: x.select(dim, -1),
        "flip": lambda x, dim, n: x.flip(dim),
        "roll": lambda x, dim, n: x.roll(n, dim),
        "pad": lambda x, dim, n: F.pad(x, (0, 0) * (-dim - 1) + (n, 0)),
        "sum": lambda x, dim, n: x.sum(dim),
        "sum_kept": lambda x, dim, n: x.sum(dim, keepdim=True),
        "sum_all": lambda x, dim, n: x.sum(),
        "mean": lambda x, dim, n: x.mean(dim),
        "mean_kept": lambda x, dim, n: x.mean((dim, -1), keepdim=True),
        "mean_all": lambda x, dim, n: x.mean(),
        "amax": lambda x, dim, n: x.amax(dim),
        "max": lambda x, dim, n: x.max(dim).values,
        "logsumexp": lambda x, dim, n: x.logsumexp(dim),
        "norm": lambda x, dim, n: (x + 0.1).norm(dim=dim),
        "softmax": lambda x, dim, n: x.softmax(dim),
        "log_softmax": lambda x, dim, n: F.log_softmax(x, dim),
        "cumsum": lambda x, dim, n: x.cumsum(dim),
        "topk": lambda x, dim, n: x.topk(n, dim).values,
        "argmax": lambda x, dim, n: x.argmax(dim),
        "repeat": lambda x, dim, n: x.repeat_interleave(n, dim),
        "tile": lambda x, dim, n: x.repeat(*[1] * (x.dim() + dim), n, *[1] * (-dim - 1)),
        "expand": lambda x, dim, n: x.unsqueeze(dim).expand(
            *x.shape[: x.dim() + dim + 1], n, *x.shape[x.dim() + dim + 1 :]
        ),
        "detach": lambda x, dim, n: x.detach(),
        "scale": lambda x, dim, n: x * 0.5,
        "shift": lambda x, dim, n: x + n,
        "neg": lambda x, dim, n: -x,
        "contiguous": lambda x, dim, n: x.transpose(0, dim).contiguous(),
        "rows": lambda x, dim, n: x[torch.arange(n) % x.shape[0]],
        "index_select": lambda x, dim, n: x.index_select(dim, torch.arange(n) % x.shape[dim]),
        "sorted": lambda x, dim, n: x.gather(dim, x.argsort(dim)),
        "tril": lambda x, dim, n: x.tril(),
        "var": lambda x, dim, n: x.var(dim, unbiased=False),
        "diff": lambda x, dim, n: x.diff(dim=dim),
        "masked": lambda x, dim, n: x.masked_fill(x > 0.3, 0.0),
        "glu": lambda x, dim, n: F.glu(x, dim),
        "in_place": lambda x, dim, n: (x * 1.0).add_(n).mul_(0.5),
        "written": lambda x, dim, n: _written(x, n),
        "qr": lambda x, dim, n: torch.linalg.qr(_full_rank(x)).R,
    }

    def __init__(self, xs: Sequence[Tensor], *, form: str, dim: int = -1, n: int = 1):
        super().__init__()
        self.function, self.dim, self.n = self.FORMS[form], dim, n

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.dim, self.n)


class Join(nn.Module):
    def __init__(self, xs: Sequence[Tensor], *, form: str = "cat", dim: int = -1):
        super().__init__()
        self.form, self.dim = form, dim

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.stack(xs, self.dim) if self.form == "stack" else torch.cat(xs, self.dim)


class Product(nn.Module):
    """``x yᵀ`` of two values, over their last dimensions."""

    def __init__(self, xs: Sequence[Tensor]):
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.transpose(-1, -2) / math.sqrt(x.shape[-1])


class Vector(nn.Module):
    """A learned scale and shift, or a buffer, along the last dimension."""

    FORMS = ("scale", "shift", "buffer", "leading")

    def __init__(self, xs: Sequence[Tensor], *, form: str = "scale"):
        super().__init__()
        self.form, x = form, xs[0]
        shape = (x.shape[0], *[1] * (x.dim() - 1)) if form == "leading" else (x.shape[-1],)
        if form == "buffer":
            self.register_buffer("vector", torch.randn(shape))
            self.vector: Tensor
        else:
            self.vector = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.vector if self.form == "shift" else x * self.vector


class Conv(nn.Module):
    """A causal convolution along the sequence, of [batch, sequence, width]."""

    def __init__(self, xs: Sequence[Tensor], *, out: int, kernel: int = 2, groups: int = 1):
        super().__init__()
        self.kernel = kernel
        self.inner = nn.Conv1d(xs[0].shape[-1], out, kernel, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x.transpose(1, 2), (self.kernel - 1, 0))
        return self.inner(y).transpose(1, 2)  # type: ignore[no-any-return]


PARTS: Mapping[str, type[nn.Module]] = {
    "linear": Linear,
    "packed": Packed,
    "norm": Norm,
    "activation": Activation,
    "dropout": Dropout,
    "pair": Pair,
    "sum": Sum,
    "embedding": Embedding,
    "lora": Lora,
    "mlp": Mlp,
    "attention": Attention,
    "padded": Padded,
    "loss": Loss,
    "pair_loss": PairLoss,
    "shaped": Shaped,
    "join": Join,
    "product": Product,
    "vector": Vector,
    "conv": Conv,
    "image": Image,
    "signal": Signal,
    "running": Running,
    "indexed": Indexed,
    "in_place": InPlace,
    "kept": Kept,
    "experts": Experts,
    "einsum": Einsum,
}
