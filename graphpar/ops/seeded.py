"""Dropout whose mask is a function of a seed that the program passes on.

A *seed* is an int64 tensor [2] on the host: a random number, drawn once per forward, and the
number of the call of a block (0: the root). With the number of the op in its graph it tells the
mask, so that backward and a replay make it again, and nothing else is kept for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphpar.ops.host_mask import host_mask
from graphpar.ops.kernels import rank_and_size
from graphpar.ops.mask_launch import masked_part, runs_here
from graphpar.ops.philox import keep_mask, philox, words_of

_EVERY_RANK = 0xFFFFFFFF  # in place of a rank's number


def draw_seed(device: torch.device) -> Tensor:
    """One number from the device's default generator; a GPU waits for it."""
    drawn = torch.empty((), dtype=torch.int64, device=device).random_()
    return torch.stack([drawn.cpu(), torch.zeros((), dtype=torch.int64)])


def call_seed(seed: Tensor, call: int) -> Tensor:
    return torch.stack([seed[0], seed.new_tensor(call)])


def seeded_dropout(
    x: Tensor,
    seed: Tensor,
    p: float,
    number: int,
    dim: int = 0,
    blocks: Sequence[int] = (),
    group: str = "",
    units: int = 0,
) -> Tensor:
    rank, ranks = rank_and_size(group) if blocks else (0, 1)
    return part_dropout(x, seed, p, number, dim, blocks, rank, ranks, units)


def part_dropout(
    x: Tensor,
    seed: Tensor,
    p: float,
    number: int,
    dim: int = 0,
    blocks: Sequence[int] = (),
    rank: int = 0,
    ranks: int = 1,
    units: int = 0,
) -> Tensor:
    """:func:`graphpar.ops.seeded_dropout` of a given rank."""
    return torch.ops.graphpar.dropout_part.default(  # type: ignore[no-any-return]
        x, seed, p, number, dim, blocks, rank, ranks, units
    )


def dropout_part(
    x: Tensor,
    seed: Tensor,
    p: float,
    number: int,
    dim: int = 0,
    blocks: Sequence[int] = (),
    rank: int = 0,
    ranks: int = 1,
    units: int = 0,
) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    value, call = seed.tolist()
    stream = number, call
    if runs_here(x):
        return masked_part(x, value, stream, p, dim, blocks, rank, ranks, units)
    layout = dim, blocks, rank, ranks, units
    if x.device.type == "cpu":
        mask = host_mask(x.shape, 1 - p, value, stream, *layout)
    else:
        mask = keep_mask(x.shape, 1 - p, value, stream, x.device, *layout)
    return apply_mask(x, mask, 1 / (1 - p))


def save_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def dropout_part_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return part_dropout(grad, seed, *ctx.rest), None, *(None for _ in ctx.rest)


def rank_dropout(
    x: Tensor,
    seed: Tensor,
    p: float,
    number: int,
    dim: int = 0,
    blocks: Sequence[int] = (),
    group: str = "",
    units: int = 0,
) -> Tensor:
    return own_dropout(x, seed, p, number, rank_and_size(group)[0] if blocks else None)


def own_dropout(x: Tensor, seed: Tensor, p: float, number: int, rank: int | None) -> Tensor:
    """:func:`graphpar.ops.rank_dropout` of a given rank; ``None``: the same on every rank."""
    stream = _EVERY_RANK if rank is None else rank
    mask = torch.ops.graphpar.dropout_bits.default(x, seed, p, number, stream)
    if get_proxy_mode() is not None:  # a compiler fuses products
        kept: Tensor = x * mask
        return kept.mul_(1 / (1 - p))
    return torch.ops.graphpar.apply_mask.default(x, mask, 1 / (1 - p))  # type: ignore[no-any-return]


def apply_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``x * mask * scale``, on a GPU by one kernel; autograd keeps the mask alone. The CPU takes
    longer for a product with a boolean."""
    if x.is_cuda and x.is_contiguous():
        return torch.ops.aten.native_dropout_backward.default(x, mask, scale)  # type: ignore[no-any-return]
    if x.device.type == "cpu":
        return torch.empty_like(x).copy_(mask.view(torch.uint8)).mul_(x).mul_(scale)
    return (x * mask).mul_(scale)


def save_mask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale = inputs
    ctx.save_for_backward(mask)


def apply_mask_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return torch.ops.graphpar.apply_mask.default(grad, mask, ctx.scale), None, None


def dropout_bits(x: Tensor, seed: Tensor, p: float, number: int, stream: int) -> Tensor:
    """A mask of the library's, from a generator seeded for this op, call and rank."""
    value, call = seed.tolist()
    low, high, _, _ = philox((stream, 0, number, call), words_of(value))
    generator = torch.Generator(x.device).manual_seed(high << 32 | low)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return mask.bernoulli_(1 - p, generator=generator)


def fake_draw_seed(device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int64)


def fake_call_seed(seed: Tensor, call: int) -> Tensor:
    return torch.empty_like(seed)


def fake_part(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def fake_bits(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)
