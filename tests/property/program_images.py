"""Convolutions, pooling and norms over channels, of [batch, sequence, width] seen as an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOLS = (
    "avg",
    "max",
    "adaptive",
    "adaptive_max",
    "all",
    "nearest",
    "bilinear",
    "shuffle",
    "unshuffle",
)
NORMS = ("batch", "batch_frozen", "group", "instance", "batch_plain")
CONVS = ("plain", "depthwise", "grouped", "transposed", "pointwise", "strided")


class Image(nn.Module):
    """[batch, width, rows, columns], the width as channels; ``form`` names what is done to it. The
    result is [batch, pixels, channels] again."""

    FORMS = (*CONVS, *POOLS, *NORMS)

    def __init__(
        self, xs: Sequence[Tensor], *, form: str, rows: int = 1, out: int = 4, bias: bool = True
    ):
        super().__init__()
        self.form, self.rows, (length, width) = form, rows, xs[0].shape[1:]
        # On the CPU torch's own gradient depends on the memory format of the image, if that has
        # two; instance norms make one image of all.
        self.flat = form == "instance" or (form.startswith("batch") and rows in (1, length))
        batch_norm = nn.BatchNorm1d if self.flat else nn.BatchNorm2d
        if form.startswith("batch") and len(xs[0]) == 1:
            raise ValueError("batch norm of one image")
        if form == "plain":
            self.inner: nn.Module = nn.Conv2d(width, out, (1, 3), padding=(0, 1), bias=bias)
        elif form == "strided":
            self.inner = nn.Conv2d(width, out, (1, 2), stride=(1, 2), bias=bias)
        elif form == "pointwise":
            self.inner = nn.Conv2d(width, out, 1, bias=bias)
        elif form == "depthwise":
            self.inner = nn.Conv2d(width, width, (1, 3), padding=(0, 1), groups=width, bias=bias)
        elif form == "grouped":
            self.inner = nn.Conv2d(width, width, 1, groups=2, bias=bias)
        elif form == "transposed":
            self.inner = nn.ConvTranspose2d(width, out, (1, 2), bias=bias)
        elif form in ("batch", "batch_frozen"):
            self.inner = batch_norm(width)
        elif form == "batch_plain":
            self.inner = batch_norm(width, affine=False, track_running_stats=False)
        elif form == "group":
            self.inner = nn.GroupNorm(2, width)
        elif form == "instance":
            self.inner = nn.InstanceNorm1d(width, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        image = x.mT.unflatten(-1, (self.rows, -1))
        if self.flat:
            return self._normed(image.flatten(2)).mT
        return self._of(image).flatten(2).mT

    def _normed(self, x: Tensor) -> Tensor:
        norm = self.inner
        if self.form == "batch_frozen":
            assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        if self.form == "group" and not x.requires_grad:
            x = x.contiguous()  # torch crashes: backward has nowhere to write to
        y: Tensor = norm(x)
        return y

    def _of(self, x: Tensor) -> Tensor:
        form, (rows, columns) = self.form, x.shape[2:]
        if form in NORMS:
            return self._normed(x)
        if form in CONVS:
            return self.inner(x)  # type: ignore[no-any-return]
        if form == "avg":
            return F.avg_pool2d(x, (1, min(2, columns)))
        if form == "max":
            return F.max_pool2d(x, (1, min(2, columns)), stride=1)
        if form == "adaptive":
            return F.adaptive_avg_pool2d(x, (1, 2))
        if form == "adaptive_max":
            return F.adaptive_max_pool2d(x, (rows, 1))
        if form == "all":
            return x.mean((2, 3), keepdim=True) * x
        if form == "nearest":
            return F.interpolate(x, scale_factor=2.0, mode="nearest")
        if form == "bilinear":
            return F.interpolate(x, size=(rows, columns + 1), mode="bilinear", align_corners=False)
        if form == "shuffle":
            return F.pixel_shuffle(x, 2)
        return F.pixel_unshuffle(x, 2)


class Signal(nn.Module):
    """[batch, width, sequence]: pooling and norms of one dimension."""

    FORMS = ("avg", "max", "adaptive", "adaptive_max", "batch", "group", "transposed", "linear")

    def __init__(self, xs: Sequence[Tensor], *, form: str, out: int = 4):
        super().__init__()
        self.form, width = form, xs[0].shape[-1]
        if form == "batch":
            self.inner: nn.Module = nn.BatchNorm1d(width, momentum=0.3)
        elif form == "group":
            self.inner = nn.GroupNorm(1, width)
        elif form == "transposed":
            self.inner = nn.ConvTranspose1d(width, out, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, form = x.mT, self.form
        if form in ("batch", "group", "transposed"):
            return self.inner(y).mT  # type: ignore[no-any-return]
        if form == "avg":
            return F.avg_pool1d(y, 2, stride=1).mT
        if form == "max":
            return F.max_pool1d(y, 2, stride=1).mT
        if form == "adaptive":
            return F.adaptive_avg_pool1d(y, 2).mT
        if form == "adaptive_max":
            return F.adaptive_max_pool1d(y, 1).mT
        size = 2 * torch.Size(y.shape)[-1]
        return F.interpolate(y, size=size, mode="linear", align_corners=True).mT
