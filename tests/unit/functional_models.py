"""Forwards that write in place and look through views, and some that graphpar refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Fn = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """Calls ``fn(self, x)``; has a parameter ``w`` and buffers ``count`` and ``mean``."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn
        self.w = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.ones(6))
        self.plain = torch.ones(6)
        self.count: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def add(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    y.add_(1).mul_(m.w)
    return y.relu_()


def add_alpha(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    y.add_(m.w, alpha=0.5)
    y -= x
    y *= 2
    y /= m.w
    return y


def base_after_view(m: Model, x: Tensor) -> Any:
    y = x * m.w
    v = y.view(-1)
    v.add_(1)
    v[3] = 7.0
    return y, v


def view_after_base(m: Model, x: Tensor) -> Any:
    y = x * m.w
    v, t = y.view(2, 12), y.t()
    y.sigmoid_()
    return v, t


def siblings(m: Model, x: Tensor) -> Any:
    y = x * m.w
    row, column, flat = y[1], y[:, 2], y.flatten()
    row.mul_(3)
    column.exp_()
    return y, row, column, flat


def nested_views(m: Model, x: Tensor) -> Any:
    y = (x * m.w).contiguous()
    v = y.view(2, 2, 6).transpose(0, 2)[1:4].select(1, 0).unsqueeze(-1)
    v.mul_(m.w.sum())
    return y, v


def setitems(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    y[:, 0] = 1.0
    y[1:3, ::2] = m.w[1:3, ::2]
    y[-1] = x[0]
    y[..., 5] *= 2
    y[0, 0] = m.w[0, 0]
    return y


def setitem_mask(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    y[y > 0] = 0.5
    y[torch.tensor([0, 2])] = m.w[:2]
    y[torch.tensor([1, 1]), torch.tensor([2, 3])] += 4
    return y


def shift_right(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    shifted = y.new_zeros(y.shape)
    shifted[:, 1:] = y[:, :-1].clone()
    shifted[:, 0] = 9
    shifted.masked_fill_(shifted == 0, -1)
    return shifted


def empty_filled(m: Model, x: Tensor) -> Tensor:
    y = torch.empty(4, 6)
    y[:2] = x[:2]
    y[2:].copy_(m.w[2:])
    return y * m.w


def many_ops(m: Model, x: Tensor) -> Any:
    y = x * m.w
    y.clamp_(-1, 1).neg_().abs_().add_(0.1)
    y.masked_fill_(x > 1, 0.25)
    y.addcmul_(x, m.w, value=0.1)
    y.lerp_(x, 0.3)
    y.where(y > 0, x)
    y.index_add_(0, torch.tensor([0, 1]), m.w[:2])
    y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), x[:, :1])
    y.scatter_add_(1, torch.ones(4, 1, dtype=torch.long), m.w[:, :1])
    y.index_fill_(1, torch.tensor([4]), 2.0)
    y.index_copy_(0, torch.tensor([3]), x[:1])
    return F.leaky_relu(y, inplace=True), F.dropout(y * 2, 0.3, True, inplace=True)


def integers(m: Model, x: Tensor) -> Any:
    mask = x > 0
    mask |= x < -1
    mask &= x < 2
    mask.logical_not_()
    count = mask.long()
    count += 3
    count <<= 1
    count[0].zero_()
    return mask, count, x * m.w * count


def zero_and_fill(m: Model, x: Tensor) -> Any:
    y, z, u = x * m.w, x * m.w, x * m.w
    y.zero_()
    z.fill_(3.0)
    u[1].fill_(m.w[0, 0])
    return y + x, z + x, u


def copy_promotes(m: Model, x: Tensor) -> Any:
    y = (x * m.w).double()
    y.copy_(m.w[0])
    h = (x * m.w).half()
    h.add_(x)
    return y, h


def out_arguments(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.empty(4, 6)
        torch.add(x, m.w, out=y)
        z = torch.empty(4)
        torch.mv(y, m.w[0], out=z)
    return (x * m.w) + y + z[:, None]


def split_and_chunk(m: Model, x: Tensor) -> Any:
    y = (x * m.w).detach()  # autograd refuses to write to one of several views
    a, b = y.chunk(2, dim=1)
    a.mul_(2)
    rows = y.unbind(0)
    rows[2].zero_()
    parts = torch.split(y, [1, 3], dim=0)
    parts[1].add_(1)
    return y * x, b


def strided_views(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    y.diagonal().add_(1)
    y.as_strided((2, 2), (6, 2), 1).mul_(2)
    torch.narrow(y, 1, 2, 2).sub_(1)
    y.movedim(0, 1)[5].add_(2)
    y.permute(1, 0).unsqueeze(0).squeeze(0)[4].mul_(3)
    y.unfold(1, 2, 2)[0, 1].add_(1)
    return y


def complex_views(m: Model, x: Tensor) -> Tensor:
    z = torch.view_as_complex((x * m.w).view(4, 3, 2).contiguous())
    torch.view_as_real(z)[..., 0].add_(1)
    z.mul_(2j)
    return torch.view_as_real(z)


def changed_shapes(m: Model, x: Tensor) -> Any:
    y = x * m.w
    z = y
    y.unsqueeze_(0)
    y.squeeze_(0).t_()
    y.add_(1)
    y.transpose_(0, 1)
    return y, z


def maybe_views(m: Model, x: Tensor) -> Any:
    y = x * m.w
    same, copy = y.reshape(24), y.t().reshape(24)
    alias, cast = y.to(torch.float32), y.to(torch.float64)
    whole = y.contiguous()
    y.add_(1)
    same.mul_(2)
    return y, same, copy, alias, cast, whole


def clone_is_no_view(m: Model, x: Tensor) -> Any:
    y = x * m.w
    z = y.clone()
    z.add_(1)
    y.mul_(2)
    return y, z


def buffers(m: Model, x: Tensor) -> Any:
    m.count += 1
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        m.mean[0] = 5
    return x * m.w + m.mean, m.count


def ring_buffer(m: Model, x: Tensor) -> Any:
    m.mean[1:] = m.mean[:-1].clone()
    m.mean[:1].copy_(x.detach()[0, :1])
    return x * m.w * m.mean


def no_grad_result(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    with torch.no_grad():
        scale = y.abs().amax()
        target = y * 2
        with torch.enable_grad():
            inner = y * m.w
        outer = inner * 2
    return y / scale + target + inner + outer


def no_grad_write(m: Model, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 6)
    with torch.no_grad():
        mask[x * m.w > 0] = 1
        mask.add_((x * m.w).sigmoid())
    return x * m.w * mask


def detached(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    z = y.detach().clone()
    z.add_(1)
    return y * z + (y * 2).detach_()


def random_order(m: Model, x: Tensor) -> Any:
    unused = torch.rand(3)
    F.dropout(x, 0.5)
    y = torch.empty(4, 6).uniform_(-1, 1) * m.w
    y.bernoulli_(0.5)
    z = torch.randn_like(x)
    z.normal_()
    F.dropout(x, 0.0)
    keep = torch.full((4, 6), 0.5).bernoulli()
    del unused
    return y * m.w, z * m.w, keep * m.w * F.dropout(x, 0.5)


def loop_cache(m: Model, x: Tensor) -> Tensor:
    y = torch.zeros(4, 6)
    state = x[:, 0] * m.w[:, 0]
    for t in range(6):
        state = torch.tanh(state + m.w[:, t] * x[:, t])
        y[:, t] = state
    return y


def broadcast(m: Model, x: Tensor) -> Any:
    y = x * m.w
    a, b, c = torch.broadcast_tensors(y, m.w[0], y[:, :1])
    with torch.no_grad():
        d, e = torch.broadcast_tensors(y, m.w[1])
    y.mul_(2)
    return a, b, c, d * x, e * x, y


def looked_at(m: Model, x: Tensor) -> Any:
    """Ops that return their argument itself, where gradients are off and where it is written to."""
    y = x * m.w
    with torch.no_grad():
        seen = y.float().mean() + y.contiguous().sum() + F.mse_loss(y, x) + (+y).amax()
        kept, same = F.dropout(y, 0.3, training=False), torch.atleast_1d(y)
    z = F.dropout(y * 2, 0.0)
    F.dropout(z, 0.3, training=False).add_(y.float()).mul_(x)
    return y, seen, kept * x, same * x, z


CASES: list[Fn] = [
    add, add_alpha, base_after_view, view_after_base, siblings, nested_views, setitems, shift_right,
    empty_filled, many_ops, integers, zero_and_fill, copy_promotes, out_arguments, split_and_chunk,
    strided_views, complex_views, changed_shapes, maybe_views, clone_is_no_view, buffers,
    ring_buffer, no_grad_result, no_grad_write, detached, random_order, loop_cache, setitem_mask,
    broadcast, looked_at,
]  # fmt: skip


def writes_input(m: Model, x: Tensor) -> Tensor:
    x[0].add_(1)
    return x * m.w


def writes_parameter(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.w.clamp_(-1, 1)
    return x * m.w


def writes_attribute(m: Model, x: Tensor) -> Tensor:
    m.plain.add_(1)
    return x * m.w * m.plain


def writes_without_gradients(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    with torch.no_grad():
        y.mul_(2)
    return y


def writes_data(m: Model, x: Tensor) -> Tensor:
    y = x * m.w
    y.data.mul_(2)
    return y


def resizes(m: Model, x: Tensor) -> Tensor:
    y = (x * m.w).detach()
    y.resize_(2, 2)
    return y


def foreach(m: Model, x: Tensor) -> Tensor:
    y = [x * 2, x * 3]
    torch._foreach_add_(y, 1.0)
    return y[0] * m.w


REFUSED: list[tuple[Fn, str]] = [
    (writes_input, "writes to the model's input x"),
    (writes_parameter, "writes to the parameter w"),
    (writes_attribute, "register it as a buffer"),
    (writes_without_gradients, "where gradients are off"),
    (writes_data, "detach"),
    (resizes, "not supported"),
    (foreach, "list of tensors"),
]
