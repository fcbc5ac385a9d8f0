"""Layers with regions of modes, and layers that ask of tensors what only their ops could tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.layer_stack import Layer


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
