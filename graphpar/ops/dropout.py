"""Dropout of a shard with the mask that the unmodified model would draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphpar.ops.kernels import part_of, rank_and_size
from graphpar.types import Shard


def dropout(
    x: Tensor, p: float, train: bool, dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Tensor:
    """The composition of ``aten.dropout``: its derivatives are those of a product."""
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    mask = torch.ops.graphpar.dropout_mask.default(x, p, dim, blocks, group, units)
    if _fused(x):
        product = torch.ops.aten.native_dropout_backward.default(x, mask, 1.0 / (1.0 - p))
    else:
        product = x * mask
    return product  # type: ignore[no-any-return]


def dropout_mask(
    x: Tensor, p: float, dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Tensor:
    """This rank's part of the whole tensor's mask, drawn as ``aten.dropout`` draws it.

    Like aten, a factor of 0 or 1 / (1 - p) in the type of ``x`` on the CPU (ATen/native/
    Dropout.cpp), and a boolean where the kernel is fused (ATen/native/cuda/Dropout.cu).
    """
    rank, ranks = rank_and_size(group)
    shape = list(x.shape)
    shape[dim] = sum(blocks)
    # The generators fill memory in its own order: keep the order of the strides.
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    whole = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)
    if _fused(x):
        whole = torch.ops.aten.native_dropout.default(whole, p, True)[1]
    else:
        whole.bernoulli_(1 - p).div_(1 - p)
    return part_of(whole, Shard(dim, tuple(blocks), units), rank, ranks)


def fake_dropout_mask(x: Tensor, p: float, *rest: Any) -> Tensor:
    dtype = torch.bool if _fused(x) else x.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _fused(x: Tensor) -> bool:
    return x.device.type in ("cuda", "xpu")
