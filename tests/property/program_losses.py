"""Losses of random programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loss(nn.Module):
    """Cross entropy along the last dimension, to an integer input or to fixed targets.

    ``form``: one op, "apart" (log_softmax, then nll_loss), "chosen" (looked up in log_softmax),
    "soft" (targets that are probabilities) or "z" (with the squared log of the normaliser).
    ``ignore``: a part of the targets is ignored; "first" is the first half of them.
    """

    FORMS = ("op", "op", "apart", "chosen", "soft", "z")

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        reduction: str = "mean",
        smoothing: float = 0.0,
        ignore: bool | str = False,
        weighted: bool = False,
        layout: str = "flat",
        form: str = "op",
        index: int = -100,
    ):
        super().__init__()
        shape, classes = xs[0].shape[:-1], xs[0].shape[-1]
        self.reduction, self.smoothing, self.layout = reduction, smoothing, layout
        targets = torch.randint(0, classes, shape)
        self.form, self.index = form, index
        if ignore == "first" and targets.numel() > 1:
            targets.view(-1)[: targets.numel() // 2] = index
        elif ignore:
            targets[..., 1:] = torch.where(
                torch.rand_like(xs[0][..., 1:, 0]) < 0.3, index, targets[..., 1:]
            )
        chances = torch.rand((*shape, classes)).softmax(-1) if form == "soft" else None
        self.register_buffer("chances", chances)
        self.chances: Tensor
        self.register_buffer("targets", targets)
        self.register_buffer("weights", torch.rand(classes) + 0.1 if weighted else None)
        self.targets: Tensor
        self.weights: Tensor | None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        targets = self.targets if targets is None else targets % x.shape[-1]
        if self.form == "soft":
            return self._soft(x)
        if self.form in ("chosen", "z"):
            return self._chosen(x, targets)
        if self.layout == "middle" and x.dim() > 2:
            x = x.transpose(1, -1)
            targets = targets.transpose(1, -1) if targets.dim() > 2 else targets
        else:
            x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        if self.form == "apart":
            logs = F.log_softmax(x, 1 if x.dim() > 1 else 0)
            return F.nll_loss(logs, targets, self.weights, None, self.index, None, self.reduction)
        return F.cross_entropy(
            x,
            targets,
            self.weights,
            ignore_index=self.index,
            reduction=self.reduction,
            label_smoothing=self.smoothing,
        )

    def _soft(self, x: Tensor) -> Tensor:
        wide = x.reshape(-1, x.shape[-1]), self.chances.reshape(-1, x.shape[-1])
        smoothing = self.smoothing
        return F.cross_entropy(
            *wide, self.weights, reduction=self.reduction, label_smoothing=smoothing
        )

    def _chosen(self, x: Tensor, targets: Tensor) -> Tensor:
        kept = targets != self.index
        places = torch.where(kept, targets, 0).unsqueeze(-1)
        if self.form == "z":
            total = x.logsumexp(-1)
            losses = total - x.gather(-1, places).squeeze(-1) + 1e-2 * total.pow(2)
        else:
            losses = -F.log_softmax(x, -1).gather(-1, places).squeeze(-1)
        losses = losses * kept
        if self.reduction == "none":
            return losses
        return losses.sum() / (kept.sum().clamp(min=1) if self.reduction == "mean" else 1)


class PairLoss(nn.Module):
    FORMS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")

    def __init__(self, xs: Sequence[Tensor], *, form: str = "mse_loss", reduction: str = "mean"):
        super().__init__()
        self.function = getattr(F, form)
        self.reduction, self.fixed = reduction, form == "soft_margin_loss"
        if form == "kl_div" and reduction == "mean":
            self.reduction = "batchmean"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = y.detach() if self.fixed else y
        return self.function(x, y, reduction=self.reduction)  # type: ignore[no-any-return]
