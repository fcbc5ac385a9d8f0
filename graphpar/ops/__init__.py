"""Typed collectives: one op for each conversion between partition types.

The ops live in ``torch.ops.graphpar`` and are what rewritten graphs call; the functions here are
the same ops for people. ``group`` is the name of a process group, ``blocks`` the sizes of the
consecutive blocks of the whole dimension, ``units`` the number of equal units of each block where
t, the group's size, does not divide them (:class:`graphpar.types.Shard`); "/ t" below stands for
a rank's part. The gradient of a conversion from a to b is the conversion from dual(b) to dual(a),
another row:

============== ===================== ================ ================ ===========================
op             from → to             forward          backward         Korthikanti et al. 2022, §4
============== ===================== ================ ================ ===========================
convert        Invariant → Replicate none             all-reduce       f
all_reduce     Partial → Invariant   all-reduce       none             f̄
all_reduce     Partial → Replicate   all-reduce       all-reduce
all_gather     Shard → Replicate     all-gather       reduce-scatter   g
reduce_scatter Partial → Shard       reduce-scatter   all-gather       ḡ
all_gather     Shard → Invariant     all-gather       none (slice)
shard          Invariant → Shard     none (slice)     all-gather
shard          Replicate → Shard     none (slice)     none (pad)
pad            Shard → Partial       none (pad)       none (slice)
all_to_all     Shard → Shard         all-to-all       all-to-all
============== ===================== ================ ================ ===========================
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from graphpar.ops import library as library  # defines torch.ops.graphpar
from graphpar.ops.kernels import rank_and_size
from graphpar.ops.recompute import recompute
from graphpar.ops.table import CONVERSION_OPS, conversion, is_conversion, signature
from graphpar.types import Type

__all__ = [
    "CONVERSION_OPS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "call_seed",
    "conversion",
    "convert",
    "convert_linear",
    "convert_many",
    "cross_entropy",
    "draw_seed",
    "dropout",
    "embedding",
    "gather",
    "gather_linear",
    "is_conversion",
    "linear_scatter",
    "log_softmax",
    "nll_loss",
    "on_rank",
    "pad",
    "rank_dropout",
    "recompute",
    "redistribute",
    "reduce_scatter",
    "seeded_dropout",
    "shard",
    "signature",
]

_ops = torch.ops.graphpar
_direct = SimpleNamespace(**library.DIRECT)


def convert(x: Tensor, group: str) -> Tensor:
    """Invariant → Replicate (the paper's f): a view of ``x``; backward all-reduces.

    ``x`` [any shape] → the same shape. The gradient that arrives is Partial, the one that leaves
    is Invariant.
    """
    return _direct.convert(x, group)  # type: ignore[no-any-return]


def all_reduce(x: Tensor, dst: Literal["I", "R"], group: str) -> Tensor:
    """Partial → Invariant (``dst="I"``, f̄, backward is the identity) or Replicate (``"R"``).

    ``x`` [any shape] → the same shape, summed over the group. To Replicate, backward all-reduces
    the Partial gradient.
    """
    return _direct.all_reduce(x, dst, group)  # type: ignore[no-any-return]


def all_gather(
    x: Tensor, dim: int, blocks: Sequence[int], dst: Literal["I", "R"], group: str, units: int = 0
) -> Tensor:
    """Shard → Replicate (``dst="R"``, g, backward reduce-scatters) or Invariant (``"I"``, slices).

    ``x`` [..., sum(blocks) / t, ...] → [..., sum(blocks), ...] at dimension ``dim``.
    """
    return _direct.all_gather(x, dim, blocks, dst, group, units)  # type: ignore[no-any-return]


def reduce_scatter(
    x: Tensor, dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Tensor:
    """Partial → Shard (the paper's ḡ); backward all-gathers to Replicate.

    ``x`` [..., sum(blocks), ...] → [..., sum(blocks) / t, ...] at dimension ``dim``.
    """
    return _direct.reduce_scatter(x, dim, blocks, group, units)  # type: ignore[no-any-return]


def all_to_all(
    x: Tensor,
    src_dim: int,
    src_blocks: Sequence[int],
    dst_dim: int,
    dst_blocks: Sequence[int],
    group: str,
    src_units: int = 0,
    dst_units: int = 0,
) -> Tensor:
    """Shard → Shard of another dimension or with other blocks; backward goes the other way.

    ``x`` [..., sum(src_blocks) / t, ..., sum(dst_blocks), ...] →
    [..., sum(src_blocks), ..., sum(dst_blocks) / t, ...].
    """
    return _direct.all_to_all(  # type: ignore[no-any-return]
        x, src_dim, src_blocks, dst_dim, dst_blocks, group, src_units, dst_units
    )


def shard(
    x: Tensor, src: Literal["I", "R"], dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Tensor:
    """Invariant (``src="I"``, backward all-gathers) or Replicate (``"R"``, pads) → Shard.

    ``x`` [..., sum(blocks), ...] → a copy of this rank's [..., sum(blocks) / t, ...]; nothing is
    communicated forward.
    """
    return _direct.shard(x, src, dim, blocks, group, units)  # type: ignore[no-any-return]


def pad(x: Tensor, dim: int, blocks: Sequence[int], group: str, units: int = 0) -> Tensor:
    """Shard → Partial: zeros where other ranks' parts are; backward slices. No communication.

    ``x`` [..., sum(blocks) / t, ...] → [..., sum(blocks), ...] at dimension ``dim``.
    """
    return _direct.pad(x, dim, blocks, group, units)  # type: ignore[no-any-return]


def gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
    keep: bool = False,
) -> list[Tensor]:
    """``aten.linear`` of :func:`all_gather` to Replicate with each of the weights and biases.

    ``x`` [..., sum(blocks) / t, ..., k] laid out at ``dim``, weights [n, k], biases [n] or None
    (none at all: no bias) → for each weight [..., sum(blocks), ..., n]. Autograd keeps ``x``, and
    backward gathers it once more while it computes the gradient of the gathered tensor, whose
    reduce-scatter runs beside the gradients of the weights (Korthikanti et al. 2022, §4.2.2).
    ``keep``: autograd keeps the gathered tensor instead, as the second run of a recomputed region
    does.
    """
    return _direct.gather_linear(  # type: ignore[no-any-return]
        x, weights, biases, dim, blocks, group, units, keep
    )


def convert_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: str
) -> list[Tensor]:
    """``aten.linear`` of :func:`convert` with each of the weights and biases.

    ``x`` [..., k], weights [n, k], biases [n] or None (none at all: no bias) → for each weight
    [..., n]. The all-reduce of the gradient of ``x`` runs beside the gradients of the weights.
    """
    return _direct.convert_linear(x, weights, biases, group)  # type: ignore[no-any-return]


def linear_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    """:func:`reduce_scatter` of ``aten.linear``, and then a bias.

    ``x`` [..., k], ``weight`` [n, k], ``bias`` [n] Replicate → [..., n] laid out at ``dim``. The
    gather of the gradient runs while that of the bias is computed.
    """
    return _direct.linear_scatter(x, weight, bias, dim, blocks, group, units)  # type: ignore[no-any-return]


def convert_many(xs: Sequence[Tensor], group: str) -> list[Tensor]:
    """:func:`convert` of each tensor; backward makes one all-reduce of all gradients of a dtype."""
    return _direct.convert_many(xs, group)  # type: ignore[no-any-return]


def dropout(
    x: Tensor, p: float, train: bool, dim: int, blocks: Sequence[int], group: str, units: int = 0
) -> Tensor:
    """Shard → the same Shard: ``aten.dropout`` with this rank's part of the whole tensor's mask.

    Every rank draws the mask of the whole tensor from the default generator of the device, so
    equal seeds give what the unmodified model gives, bit for bit on the CPU.
    """
    return _ops.dropout.default(x, p, train, dim, blocks, group, units)  # type: ignore[no-any-return]


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    """Table Shard(0), ids Replicate → Partial: ``aten.embedding`` of the rows that the rank holds.

    ``weight`` [sum(blocks) / t, d], ``indices`` [...] of the whole table → [..., d], zero for ids
    of other ranks (and for those outside the table). The gradient is that of the own rows, zero
    for ``padding_idx``. Megatron-LM's vocabulary-parallel embedding (Shoeybi et al. 2019, §3).
    """
    return _direct.embedding(  # type: ignore[no-any-return]
        weight, indices, padding_idx, scale_grad_by_freq, sparse, dim, blocks, group, units
    )


def gather(
    x: Tensor,
    gather_dim: int,
    index: Tensor,
    sparse_grad: bool,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    """Shard(dim), index Replicate → Partial: ``aten.gather`` along the sharded dimension ``dim``.

    ``x`` [..., sum(blocks) / t, ...], ``index`` of places in the whole dimension → the index's
    shape, zero where other ranks hold the element.
    """
    return _direct.gather(x, gather_dim, index, sparse_grad, dim, blocks, group, units)  # type: ignore[no-any-return]


def log_softmax(
    x: Tensor,
    softmax_dim: int,
    dtype: torch.dtype | None,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    """Shard → the same Shard: ``aten.log_softmax`` along the sharded dimension ``dim``.

    ``x`` [..., sum(blocks) / t, ...] → the same shape. Forward all-reduces a maximum and a sum
    without that dimension, backward a sum.
    """
    return _direct.log_softmax(x, softmax_dim, dtype, dim, blocks, group, units)  # type: ignore[no-any-return]


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    """Logits Shard(classes), target Replicate → Invariant: ``aten.cross_entropy_loss``.

    ``x`` [N, sum(blocks) / t, ...], class indices ``target`` [N, ...], class weights ``weight``
    [sum(blocks) / t] → [N, ...] or, with ``reduction`` 1 (mean) or 2 (sum), a scalar. Two
    all-reduces of a few numbers per token forward, none backward: the gradient of the logits is
    softmax less the (smoothed) targets on the classes held (Shoeybi et al. 2019, §3). float32
    inside where ``x`` is narrower.
    """
    return _direct.cross_entropy(  # type: ignore[no-any-return]
        x, target, weight, reduction, ignore_index, label_smoothing, dim, blocks, group, units
    )


def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    """Log-probabilities Shard(classes), target and weights Replicate → Partial: ``nll_loss``.

    Shapes as in :func:`cross_entropy`, but ``weight`` is whole. No communication.
    """
    return _direct.nll_loss(  # type: ignore[no-any-return]
        x, target, weight, reduction, ignore_index, dim, blocks, group, units
    )


def draw_seed(device: torch.device) -> Tensor:
    """A seed [2] (int64, on the host) from the default generator of the device: one number, and 0
    for the root. A GPU waits for it, once per forward."""
    return _ops.draw_seed.default(device)  # type: ignore[no-any-return]


def call_seed(seed: Tensor, call: int) -> Tensor:
    """The seed of a block's call: the same number, with the number of the call."""
    return _ops.call_seed.default(seed, call)  # type: ignore[no-any-return]


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
    """Dropout with the mask that :func:`graphpar.ops.philox.keep_mask` gives, or on the CPU
    :func:`graphpar.ops.host_mask.host_mask`, whatever the ranks.

    ``x``, a part that ``dim`` and ``blocks`` lay out (without blocks the whole) → the same shape.
    ``number`` is that of the op in its graph. Autograd keeps the seed and makes the mask again.
    """
    return _ops.seeded_dropout.default(  # type: ignore[no-any-return]
        x, seed, p, number, dim, blocks, group, units
    )


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
    """:func:`seeded_dropout` with a mask of torch's generator: where there are blocks, every rank
    has a mask of its own. Autograd keeps the mask (bool)."""
    return _ops.rank_dropout.default(  # type: ignore[no-any-return]
        x, seed, p, number, dim, blocks, group, units
    )


def on_rank(values: Sequence[int], group: str) -> int:
    """The value of this rank: sizes that are not the same on all ranks."""
    return values[rank_and_size(group)[0]]


def redistribute(x: Tensor, source: Type, target: Type, group: str) -> Tensor:
    """Convert ``x`` between two types; equal types return ``x``."""
    if source == target:
        return x
    op, args = conversion(source, target, group)
    return op(x, *args)  # type: ignore[no-any-return]
