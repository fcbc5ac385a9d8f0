"""Small models of the kinds that broke other projects, and a count of their collectives."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.interpret import model_state
from graphpar.ops import reference
from graphpar.program import Program
from graphpar.simulate import Simulation
from graphpar.testing import assert_equivalent
from graphpar.types import CONVERSIONS, Shard, Type, letter


def equivalent(model: nn.Module, *args: Tensor, tp: int, sp: bool) -> Program:
    """The rewritten program, proven equal to the model."""
    found = assert_equivalent(model, args, tp=tp, sp=sp, atol=1e-10, rtol=1e-10)
    return found.program


def sharded_state(program: Program) -> dict[str, Shard]:
    return {n: s.type for n, s in program.state.items() if isinstance(s.type, Shard)}


class Traffic:
    """The collectives that a run makes, by kind, and the whole shapes they carry."""

    def __init__(self, program: Program, model: nn.Module, *args: Tensor) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.shapes: list[tuple[int, ...]] = []
        counts = self.forward
        convert = reference._convert

        def counted(parts: Any, source: Type, target: Type) -> list[Tensor]:
            results = convert(parts, source, target)
            kind = CONVERSIONS[letter(source), letter(target)][0]
            if kind:
                counts[kind] += 1
                self.shapes.append(max(tuple(p.shape) for p in (*parts, *results)))
            return results

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_convert", counted)
            self.simulation = Simulation(program, model_state(model))
            leaves = [
                [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
                for _ in range(program.ranks)
            ]
            results = self.simulation.run(leaves)
            counts = self.backward
            self.shapes = []
            roots = [y for rank in results for y in rank if y.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])

    @property
    def counts(self) -> tuple[int, int]:
        return self.forward.total(), self.backward.total()


class Attention(nn.Module):
    """Separate projections; ``split`` and ``group`` make heads and repeat those of k and v."""

    def __init__(
        self, width: int = 32, heads: int = 8, kv_heads: int | None = None, group: str = "repeat"
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads or heads, width // heads
        self.group = group
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k = nn.Linear(width, self.kv_heads * self.d)
        self.v = nn.Linear(width, self.kv_heads * self.d)

    def repeat(self, x: Tensor) -> Tensor:
        times = self.heads // self.kv_heads
        if times == 1:
            return x
        if self.group == "repeat":
            return x.repeat_interleave(times, 1)
        b, g, s, d = x.shape
        return x[:, :, None].expand(b, g, times, s, d).reshape(b, g * times, s, d)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        q = self.q(x).view(b, -1, self.heads, self.d).transpose(1, 2)
        k = self.k(x).view(b, -1, self.kv_heads, self.d).transpose(1, 2)
        v = self.v(x).view(b, -1, self.kv_heads, self.d).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, -1, self.heads * self.d))  # type: ignore[no-any-return]


class PackedAttention(nn.Module):
    def __init__(self, width: int, sizes: tuple[int, int, int], d: int) -> None:
        super().__init__()
        self.sizes, self.d = sizes, d
        self.qkv, self.o = nn.Linear(width, sum(sizes)), nn.Linear(sizes[0], width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(x)
        if len(set(self.sizes)) == 1:
            q, k, v = packed.split(self.sizes[0], dim=2)
        else:
            q, k, v = packed.split(list(self.sizes), -1)
        q, k, v = (t.view(b, s, -1, self.d).transpose(1, 2) for t in (q, k, v))
        times = q.shape[1] // k.shape[1]
        if times > 1:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(g) * u)  # type: ignore[no-any-return]


class NormedQuery(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.norm.weight.data.normal_()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.norm(self.q(x)).view(b, s, 8, 4).transpose(1, 2)
        k = self.k(x).view(b, s, 8, 4).transpose(1, 2)
        v = self.v(x).view(b, s, 8, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, 32))  # type: ignore[no-any-return]


def mlp(width: int, inner: int, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), activation(), nn.Linear(inner, width))


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(32), Attention(), mlp(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x)) + self.mlp(self.norm(x))  # type: ignore[no-any-return]


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda h: torch.cumsum(h, -1),
    "softmax": lambda h: torch.softmax(h, -1),
    "topk": lambda h: torch.topk(h, 2).values,
}


class Between(nn.Module):
    def __init__(self, middle: str) -> None:
        super().__init__()
        self.middle = MIDDLES[middle]
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(2 if middle == "topk" else 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))  # type: ignore[no-any-return]


class Triangular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.linalg.qr(h).R)  # type: ignore[no-any-return]


class RelativeBias(nn.Module):
    def __init__(self, heads: int = 4, d: int = 4) -> None:
        super().__init__()
        self.heads, self.d, width = heads, d, heads * d
        self.bias = nn.Embedding(32, heads)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.o = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        place = torch.arange(s)
        bias = self.bias(place[None] - place[:, None] + 16).permute(2, 0, 1).unsqueeze(0)
        for qkv, o in zip(self.qkv, self.o, strict=True):
            q, k, v = (
                t.view(b, s, self.heads, self.d).transpose(1, 2) for t in qkv(x).chunk(3, -1)
            )
            chances = torch.softmax(q @ k.transpose(-1, -2) / 2 + bias, -1)
            x = x + o((chances @ v).transpose(1, 2).reshape(b, s, w))
        return x


class ComplexRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angle), angle))
        self.freqs: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 4)
        pairs = torch.view_as_complex(q.reshape(b, s, 4, -1, 2)) * self.freqs[None, :, None, :]
        return self.o(torch.view_as_real(pairs).flatten(3).reshape(b, s, 16))  # type: ignore[no-any-return]


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), mlp(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.layer(self.norm(x))
        return x


class TwoPlaces(nn.Module):
    """One Linear between heads, where it is sharded, and after an op that keeps axes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shared, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.relu(self.shared(x)))
        return y, torch.softmax(self.shared(torch.softmax(self.up(x), -1)), -1)


class PreNorm(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


def two_blocks() -> nn.Sequential:
    return nn.Sequential(PreNorm(), PreNorm(), nn.LayerNorm(16))


class SecondBias(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.down.bias.data.fill_(100.0)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.form == "module":
            return self.down(h)  # type: ignore[no-any-return]
        if self.form == "function":
            return F.linear(h, self.down.weight) + self.down.bias
        return h @ self.down.weight.T + self.down.bias


def freeze(model: nn.Module, pattern: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if re.search(pattern, name):
            parameter.requires_grad_(False)
    return model


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.c, self.d = nn.Linear(32, 2, bias=False), nn.Linear(2, 16, bias=False)
        freeze(self, "up|down")

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x) + math.pi * self.b(self.a(x)))
        return self.down(h) + math.pi * self.d(self.c(h))  # type: ignore[no-any-return]
