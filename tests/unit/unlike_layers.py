"""Layers that differ from each other in ways that a class, sizes and names do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


class ScaledByIndex(Layer):
    def change(self, x: Tensor) -> Any:
        return x / (self.index + 1)


class Windows(Layer):
    def change(self, x: Tensor) -> Any:
        return torch.tril(x) if self.index % 2 else torch.triu(x)


class DropPath(Layer):
    def change(self, x: Tensor) -> Any:
        return F.dropout(x, 0.1 * self.index, self.training)


class FloatAttribute(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = (1.0, 1.0, -0.0, 0.0)[index]

    def change(self, x: Tensor) -> Any:
        return x * self.scale


class Buffer(Layer):
    scale: Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("scale", torch.tensor(float(index)))

    def change(self, x: Tensor) -> Any:
        return x * self.scale


class PlainTensor(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = torch.tensor(float(index))

    def change(self, x: Tensor) -> Any:
        return x * self.scale


class Made(Layer):
    def change(self, x: Tensor) -> Any:
        return x * torch.tensor(float(self.index))


class MadeAlike(Layer):
    def change(self, x: Tensor) -> Any:
        return x * torch.tensor(1.0 + self.index // 2) * (torch.tensor([2.0]) + 1)


class MadeOfSeveral(Layer):
    def change(self, x: Tensor) -> Any:
        return x[..., :2] @ torch.tensor([[1.0 + self.index] * WIDTH, [2.0] * WIDTH])


class MadeAndRead(Layer):
    """Python goes by the value of a tensor."""

    def change(self, x: Tensor) -> Any:
        scale = torch.tensor(1.0 + self.index // 2)
        return torch.tanh(x) * float(scale) if scale > 1 else x * float(scale)


class MadeAndReadLater(Layer):
    """The value is read after what the layers have in common."""

    def change(self, x: Tensor) -> Any:
        scale = torch.tensor(3.0)
        x = torch.tanh(x) if self.index == 2 else torch.sin(x)
        return x * int(scale * 2)


class MadeAndWritten(Layer):
    def change(self, x: Tensor) -> Any:
        scale = torch.tensor(1.0)
        same = scale.view(1)
        scale += self.index
        return x * same * float(scale)


class ReadsWritten(Layer):
    """A constant that is no longer one when it is read, but for the one that it was copied to."""

    def change(self, x: Tensor) -> Any:
        scale = torch.tensor(2.0 + self.index // 2)
        kept = scale.clone()
        same = scale.view(1)
        scale += 0
        return x * same * int(kept) * (scale + float(kept))


class Closure(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        scale = 1.0 + index
        self.act: Any = lambda x: x * scale

    def change(self, x: Tensor) -> Any:
        return self.act(x)


class TensorClosure(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        scale = torch.tensor([1.0 + index] * WIDTH)
        self.act: Any = lambda x: x * scale

    def change(self, x: Tensor) -> Any:
        return self.act(x)


class Property(Layer):
    @property
    def scale(self) -> float:
        return 1.0 + self.index // 2

    def change(self, x: Tensor) -> Any:
        return x * self.scale


class Inner(nn.Module):
    """State that is not the layer's own: of a class, of a global, of a list."""

    count = 0


class ClassCounter(Layer):
    def change(self, x: Tensor) -> Any:
        Inner.count += 1
        return x * Inner.count


class GlobalParity(Layer):
    def change(self, x: Tensor) -> Any:
        Inner.count += 1
        return torch.sin(x) if Inner.count % 2 else torch.cos(x)


class OwnCounter(Layer):
    """A number that the layer increments."""

    calls = 0

    def change(self, x: Tensor) -> Any:
        self.calls += 1
        return x * self.calls


class SharedList(Layer):
    seen: list[Tensor] = []  # noqa: RUF012 - shared by all, as is the point

    def change(self, x: Tensor) -> Any:
        self.seen.append(x)
        return torch.stack(self.seen).sum(0)


class Remembered(Layer):
    """Leaves a tensor from its midst for the next layer."""

    last: list[Tensor] = []  # noqa: RUF012

    def change(self, x: Tensor) -> Any:
        x = torch.tanh(x)
        before = self.last[0] if self.last else x
        self.last[:] = [x]
        return x + before


class BranchOnLine(Layer):
    def change(self, x: Tensor) -> Any:
        if self.index == 2:
            return x * 2
        return x * 2  # the same op, of another line


class ExtraOps(Layer):
    def change(self, x: Tensor) -> Any:
        for _ in range(self.index):
            x = torch.tanh(x)
        return x


class InPlace(Layer):
    def change(self, x: Tensor) -> Any:
        x = torch.tanh(x)
        x[:, :2].mul_(2)
        view = x.transpose(0, 1)
        x += 1
        return view.transpose(0, 1).relu_()


class WritesInput(Layer):
    def forward(self, x: Tensor) -> Any:
        if self.index:
            x += 1
        return self.down(self.up(x))


class Counter(Layer):
    steps: Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def change(self, x: Tensor) -> Any:
        self.steps += 1
        return x * self.steps


class NoGrad(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.abs().mean()
        return x / scale


class Autocast(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.transpose(-1, -2) @ x).float()


class NoGradAtTimes(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.set_grad_enabled(self.index % 2 == 0):
            scale = x.abs().mean()
        return x / scale


class UnlikeInNoGrad(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.abs()
            scale = torch.tanh(scale) if self.index == 2 else torch.sin(scale)
            scale = scale.mean()
        return x / scale


class LeavesGradOff(Layer):
    """Which the next layer finds so."""

    def change(self, x: Tensor) -> Any:
        y = x * 2
        torch.set_grad_enabled(self.index != 1)
        return y + x.tanh()


class Precisions(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.autocast("cpu", (torch.bfloat16, torch.float16)[self.index // 2]):
            return (x @ x.transpose(-1, -2) @ x).float()


class AutocastAtTimes(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.index != 1):
            return (x @ x.transpose(-1, -2) @ x).float()


class UnlikeInAutocast(Layer):
    def change(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.transpose(-1, -2)
            y = torch.tanh(y) if self.index == 2 else torch.sin(y)
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ x.float()
            return (y @ x).float() + z


class AutocastAcross(Layer):
    """Begins in one layer, ends in the next."""

    region: list[Any] = []  # noqa: RUF012 - shared by all, as is the point

    def change(self, x: Tensor) -> Any:
        y = (x @ x.transpose(-1, -2)).float()
        if self.region:
            self.region.pop().__exit__(None, None, None)
        else:
            self.region.append(torch.autocast("cpu", torch.bfloat16))
            self.region[0].__enter__()
        return (y @ x.float()).float()


class Detached(Layer):
    def change(self, x: Tensor) -> Any:
        return x + torch.tanh(x).detach()


class Several(Layer):
    def change(self, x: Tensor) -> Any:
        a, b = x.chunk(2, -1)
        values, places = x.topk(2, -1)
        c, *_ = torch.split(x, [2, 6], -1)
        return torch.cat([b, a], -1) + values.sum() + places.sum() + c.sum()


class PartlyTheSame(Layer):
    """One call of several ops, of which the last differ."""

    def change(self, x: Tensor) -> Any:
        return x * x[:, 1:3, self.index // 2].sum()


class Factories(Layer):
    def change(self, x: Tensor) -> Any:
        place = torch.arange(x.shape[1], device=x.device)[:, None]
        ramp = torch.linspace(0, 1, x.shape[-1])
        return x * place + ramp + torch.zeros(3, 1, dtype=x.dtype)[None, 0] + x.new_ones(1)


class Attention(Layer):
    def change(self, x: Tensor) -> Any:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        found = F.scaled_dot_product_attention(heads, heads, heads, mask, 0.1 * self.training)
        return found.transpose(1, 2).flatten(-2)


class AsksOfMemory(Layer):
    def change(self, x: Tensor) -> Any:
        y = torch.tanh(x)
        z = y.view(-1)
        assert z._base is not None
        return z.view_as(y)


class AsksInVain(Layer):
    def change(self, x: Tensor) -> Any:
        try:
            shared = x._is_view()
        except Exception:
            shared = False
        return x * 2 if shared else x * 3


class AsksOfParameters(Layer):
    """What they can tell; no op stands behind them."""

    def change(self, x: Tensor) -> Any:
        return x * 2 if self.up.weight.is_leaf and self.up.weight.grad_fn is None else x * 3


class ChangesFlagFirst(Layer):
    """Of a tensor that the later layers do not change."""

    def change(self, x: Tensor) -> Any:
        y = torch.zeros_like(x)
        if self.index == 0:
            y.requires_grad_()
        z = y * 2
        return x + (z.cos() if z.requires_grad else z.sin())


class ChangesFlag(Layer):
    def change(self, x: Tensor) -> Any:
        y = torch.zeros_like(x)
        if self.index == 2:
            y.requires_grad_()
        z = y * 2
        return x + (z.cos() if z.requires_grad else z.sin())


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class StraightThrough(Layer):
    def change(self, x: Tensor) -> Any:
        return OwnFunction.apply(x)  # type: ignore[no-untyped-call]


ALL, NONE = ["layers.1", "layers.2", "layers.3"], list[str]()
KINDS: list[tuple[type[Layer], list[str]]] = [
    (ScaledByIndex, NONE),
    (Windows, ["layers.2", "layers.3"]),
    (DropPath, NONE),
    (FloatAttribute, ["layers.1"]),
    (Buffer, ALL),
    (PlainTensor, ALL),
    (Made, NONE),
    (MadeAlike, ["layers.1", "layers.3"]),
    (MadeOfSeveral, ALL),
    (MadeAndRead, ["layers.1", "layers.3"]),
    (MadeAndReadLater, ["layers.1", "layers.3"]),
    (ReadsWritten, ["layers.1", "layers.3"]),
    (MadeAndWritten, NONE),
    (Closure, NONE),
    (TensorClosure, ALL),
    (Property, ["layers.1", "layers.3"]),
    (ClassCounter, NONE),
    (GlobalParity, ["layers.2", "layers.3"]),
    (OwnCounter, ALL),
    (SharedList, NONE),
    (Remembered, ["layers.2", "layers.3"]),
    (BranchOnLine, ["layers.1", "layers.3"]),
    (ExtraOps, NONE),
    (InPlace, ALL),
    (WritesInput, ["layers.2", "layers.3"]),
    (Counter, ALL),
    (NoGrad, ALL),
    (NoGradAtTimes, ["layers.2", "layers.3"]),
    (UnlikeInNoGrad, ["layers.1", "layers.3"]),
    (LeavesGradOff, ["layers.3"]),
    (Autocast, ALL),
    (Precisions, ["layers.1", "layers.3"]),
    (AutocastAtTimes, ["layers.2", "layers.3"]),
    (UnlikeInAutocast, ["layers.1", "layers.3"]),
    (AutocastAcross, ["layers.2", "layers.3"]),
    (Detached, ALL),
    (Several, ALL),
    (PartlyTheSame, ["layers.1", "layers.3"]),
    (Factories, ALL),
    (Attention, ALL),
    (AsksOfMemory, NONE),
    (AsksInVain, NONE),
    (AsksOfParameters, ALL),
    (ChangesFlagFirst, NONE),
    (ChangesFlag, NONE),
    (StraightThrough, ALL),
]
