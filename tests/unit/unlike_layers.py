"""Layers that differ from each other in ways that a class, sizes and names do not tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.layer_stack import WIDTH, Layer
from tests.unit.layers_in_modes import (
    AsksInVain,
    AsksOfMemory,
    AsksOfParameters,
    Attention,
    Autocast,
    AutocastAcross,
    AutocastAtTimes,
    ChangesFlag,
    ChangesFlagFirst,
    Detached,
    Factories,
    LeavesGradOff,
    NoGrad,
    NoGradAtTimes,
    PartlyTheSame,
    Precisions,
    Several,
    StraightThrough,
    UnlikeInAutocast,
    UnlikeInNoGrad,
)


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
