"""Ops along a sharded axis: what each rank computes, and what is reduced between, written once.

An op is a generator. It yields tensors to reduce over the ranks, each with the type that the
reduction has ("max" takes no gradient), receives them reduced and returns its result. So one text
runs on a process group (:func:`on_group`) and on all ranks of a simulation
(:func:`graphpar.ops.reference.on_all_ranks`), and its gradient is that of the typed reductions:

- A sum of addends to Invariant has no collective in backward: what is computed of it is the same
  on every rank, and so is its gradient. Cross entropy's loss is such a value, so the gradient of
  the logits is local: softmax less the targets, on the classes held (Shoeybi et al. 2019,
  Megatron-LM, section 3; Korthikanti et al. 2022, f̄).
- A sum to Replicate is used with each rank's part, so its gradient is summed (``log_softmax``).
- The maximum only keeps the exponentials in range: the result does not depend on it.

Ids that no rank holds are not checked: a lookup of them is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from graphpar.ops import collectives
from graphpar.ops.kernels import rank_and_size
from graphpar.types import I, Invariant, R, Replicate, Shard, intervals, split_layout

aten = torch.ops.aten

Reduction = Invariant | Replicate | Literal["max"]
Steps = Generator[tuple[Tensor, Reduction], Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """The rank, and how the first operand is laid out."""

    layout: Shard
    rank: int
    ranks: int

    @property
    def dim(self) -> int:
        return self.layout.dim

    @property
    def size(self) -> int:
        """The size of the whole dimension."""
        return sum(self.layout.blocks)

    @property
    def held(self) -> tuple[tuple[int, int], ...]:
        """(start in the whole dimension, size) of the pieces that this rank has."""
        return intervals(self.layout, self.rank, self.ranks)

    def positions(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where this rank holds each id (0 for those of others), and whether it does."""
        ids = ids.long()
        found, mine = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        offset = 0
        for start, size in self.held:
            here = (ids >= start) & (ids < start + size)
            found = torch.where(here, ids - (start - offset), found)
            mine = mine | here
            offset += size
        return found, mine

    def position(self, id: int) -> int:
        """Where this rank holds one id, which all ranks know; -1 if it does not."""
        offset = 0
        for start, size in self.held:
            if start <= id < start + size:
                return offset + id - start
            offset += size
        return -1


def embedding(
    place: Place,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Steps:
    """Table Shard(0), ids Replicate → Partial: the rows held, zeros for the others.

    Gradient: each rank's own rows (Shoeybi et al. 2019, section 3).
    """
    found, mine = place.positions(indices)
    padding = place.position(padding_idx)
    rows: Tensor = aten.embedding.default(weight, found, padding, scale_grad_by_freq, sparse)
    return rows.masked_fill(~mine.unsqueeze(-1), 0)
    yield  # a generator without a reduction


def gather(
    place: Place, x: Tensor, gather_dim: int, index: Tensor, sparse_grad: bool = False
) -> Steps:
    """``x`` Shard(gather_dim), index Replicate → Partial: the elements held, zeros for others."""
    found, mine = place.positions(index)
    picked: Tensor = aten.gather.default(x, gather_dim, found, sparse_grad=sparse_grad)
    return picked.masked_fill(~mine, 0)
    yield  # a generator without a reduction


def log_softmax(place: Place, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Steps:
    """Shard → Shard of the axis that is normalised. float32 inside where ``x`` is narrower."""
    dtype = dtype or x.dtype
    shifted = yield from _shifted(place, _wide(x.to(dtype)))
    total = yield shifted.exp().sum(place.dim), R
    return (shifted - total.log().unsqueeze(place.dim)).to(dtype)


def cross_entropy(
    place: Place,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Steps:
    """Logits Shard(classes), target Replicate, class weights Shard(0) → loss Invariant.

    ``aten.cross_entropy_loss`` of class indices. Per token, the ranks reduce a maximum, then in
    one tensor the sum of exponentials, the target's logit and, where they are asked for, the
    target's weight and the sums that label smoothing needs.
    """
    dim = place.dim
    shifted = yield from _shifted(place, _wide(x))
    found, mine = place.positions(target)
    addends = [shifted.exp().sum(dim), _picked(shifted, found, mine, dim)]
    if weight is not None:
        weight = weight.to(shifted.dtype)
        addends.append(weight[found].masked_fill(~mine, 0))
    if label_smoothing:
        each = shifted if weight is None else shifted * _along(weight, shifted, dim)
        addends.append(each.sum(dim))
        if weight is not None:
            addends.append(weight.sum().expand_as(target))
    sums = iter((yield torch.stack(addends), I).unbind())
    log_total, picked = next(sums).log(), next(sums)
    of_target = None if weight is None else next(sums)
    losses = log_total - picked
    if of_target is not None:
        losses = losses * of_target
    if label_smoothing:
        all_logits = next(sums)
        all_weights = place.size if weight is None else next(sums)
        smooth = log_total * all_weights - all_logits
        share = label_smoothing / place.size
        losses = (1 - label_smoothing) * losses + share * smooth
    return _reduced(losses, target != ignore_index, of_target, reduction).to(x.dtype)


def nll_loss(
    place: Place,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Steps:
    """Log-probabilities Shard(classes), target and class weights Replicate → loss Partial.

    ``aten.nll_loss_nd``: a lookup, and every rank has all weights to divide a mean by.
    """
    kept = target != ignore_index
    losses = -_picked(x, *place.positions(target), place.dim)
    weights = None if weight is None else weight[target.long().masked_fill(~kept, 0)]
    if weights is not None:
        losses = losses * weights
    return _reduced(losses, kept, weights, reduction)
    yield  # a generator without a reduction


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _shifted(place: Place, x: Tensor) -> Steps:
    """``x`` less the greatest of all ranks."""
    top = yield x.detach().amax(place.dim), "max"
    return x - top.unsqueeze(place.dim)


def _picked(x: Tensor, found: Tensor, mine: Tensor, dim: int) -> Tensor:
    """The targets' elements that this rank holds, zeros for the others.

    By index, since autograd would keep ``x`` for ``gather``. Rows are taken as they are: autograd
    adds to no gradient in place whose memory a view shares.
    """
    rows = x if (x.dim(), dim) == (2, 1) else x.movedim(dim, -1).reshape(-1, x.size(dim))
    each = torch.arange(len(rows), device=x.device)
    return rows[each, found.flatten()].view(found.shape).masked_fill(~mine, 0)


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.view([-1 if d == dim else 1 for d in range(x.dim())])


def _reduced(losses: Tensor, kept: Tensor, weights: Tensor | None, reduction: int) -> Tensor:
    """``reduction`` 0 none, 1 mean (over the targets' weights), 2 sum; ignored tokens count 0."""
    losses = losses.masked_fill(~kept, 0)
    if reduction == 0:
        return losses
    if reduction == 2:
        return losses.sum()
    return losses.sum() / (kept if weights is None else weights.masked_fill(~kept, 0)).sum()


SHARDED: dict[str, Callable[..., Steps]] = {
    "embedding": embedding,
    "gather": gather,
    "log_softmax": log_softmax,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
}

ALL_REDUCES = {"log_softmax": (2, 1), "cross_entropy": (2, 0)}
"""How many all-reduces an op makes, in forward and in backward; the others make none."""


def on_group(name: str, args: Sequence[Any]) -> Tensor:
    """Run this rank's part of an op."""
    rest, layout, group = split_layout(args)
    steps = SHARDED[name](Place(layout, *rank_and_size(group)), *rest)
    try:
        x, kind = next(steps)
        while True:
            x, kind = steps.send(_reduce(x, kind, group))
    except StopIteration as end:
        result: Tensor = end.value
        return result


def _reduce(x: Tensor, kind: Reduction, group: str) -> Tensor:
    if kind == "max":
        return collectives.all_reduce(x, group, "max")()
    found: Tensor = torch.ops.graphpar.all_reduce.default(x, str(kind)[0], group)
    return found
