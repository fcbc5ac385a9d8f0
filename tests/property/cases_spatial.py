"""Random calls of pooling, resampling, and other ops over images and signals."""

from __future__ import annotations

import torch

from tests.property.pick import Pick
from tests.property.rule_checks import Case, Maker, Target

aten = torch.ops.aten


def image(p: Pick, count: int) -> torch.Tensor:
    """Batch, channels, and ``count`` dimensions of at least 2."""
    lead = [p.one((1, 2, 3, 4, 6)) for _ in range(2)]
    return p.x(*lead, *(p.number(2, 5) for _ in range(count)))


def distinct(p: Pick, count: int) -> torch.Tensor:
    """An image without ties, whose maxima are unique."""
    x = image(p, count)
    return p.permutation(x.numel()).reshape(x.shape).double()


def pool(target: Target, count: int) -> Maker:
    def make(p: Pick) -> Case:
        kernel = [p.number(1, 2) for _ in range(count)]
        x = distinct(p, count) if "max" in str(target) else image(p, count)
        return Case(target, (x, kernel, [p.number(1, 2) for _ in range(count)]))

    return make


def adaptive(target: Target, count: int) -> Maker:
    def make(p: Pick) -> Case:
        x = distinct(p, count) if "max" in str(target) else image(p, count)
        return Case(target, (x, [p.number(1, 3) for _ in range(count)]))

    return make


def upsample(target: Target, count: int, *, aligned: bool) -> Maker:
    def make(p: Pick) -> Case:
        size = [p.number(2, 6) for _ in range(count)]
        return Case(target, (image(p, count), size, *([p.flag()] if aligned else [])))

    return make


def grid_sampler(target: Target, count: int) -> Maker:
    """Nearest or linear samples; points outside the image are zeros or those at its border."""

    def make(p: Pick) -> Case:
        n, points = p.one((1, 2, 4)), [p.one((1, 2, 4)) for _ in range(count)]
        x = p.x(n, p.one((1, 2, 4)), *(p.number(2, 4) for _ in range(count)))
        grid = 2 * p.positive(n, *points, count) - 1
        return Case(target, (x, grid, p.number(0, 1), p.number(0, 1), p.flag()))

    return make


def pixel_shuffle(p: Pick) -> Case:
    return Case(aten.pixel_shuffle.default, (p.x(p.size(), 4 * p.number(1, 2), p.size(), 3), 2))


def pixel_unshuffle(p: Pick) -> Case:
    x = p.x(p.size(), p.size(), 2 * p.number(1, 2), 4)
    return Case(aten.pixel_unshuffle.default, (x, 2))


def channel_shuffle(p: Pick) -> Case:
    return Case(aten.channel_shuffle.default, (p.x(p.size(), 2 * p.number(1, 3), 2, 2), 2))


def im2col(p: Pick) -> Case:
    return Case(aten.im2col.default, (image(p, 2), [2, 2], [1, 1], [0, 0], [1, p.number(1, 2)]))


def group_norm(p: Pick) -> Case:
    groups = p.number(1, 3)
    n, c, spatial = p.size(), groups * p.number(1, 3), [p.size() for _ in range(p.number(1, 2))]
    affine = [p.x(c), p.x(c)] if p.flag() else [None, None]
    x = p.x(n, c, *spatial)
    size = x[0, 0].numel()
    return Case(aten.native_group_norm.default, (x, *affine, n, c, size, groups, 1e-5))


def convolution(p: Pick) -> Case:
    """One or two spatial dimensions, plain or transposed."""
    count, transposed = p.number(1, 2), p.flag()
    ins, outs = p.size(), p.size()
    kernel = [p.number(1, 2) for _ in range(count)]
    weight = p.x(*((ins, outs) if transposed else (outs, ins)), *kernel)
    x = p.x(p.size(), ins, *(p.number(2, 4) for _ in range(count)))
    bias = p.x(outs) if p.flag() else None
    ones, zeros = [1] * count, [0] * count
    args = (x, weight, bias, ones, zeros, ones, transposed, zeros, 1)
    return Case(aten.convolution.default, args)


def convolution_of_groups(p: Pick) -> Case:
    x, weight = p.x(2, 4, 3), p.x(4, 2, 2)
    args = (x, weight, None, [1], [0], [1], False, [0], 2)
    return Case(aten.convolution.default, args)


def real_fourier(p: Pick) -> Case:
    x = p.x(*p.shape(1, 3))
    return Case(aten._fft_r2c.default, (x, [p.number(0, x.dim() - 1)], 0, p.flag()))


def _complex(p: Pick) -> torch.Tensor:
    shape = p.shape(1, 3)
    return torch.complex(p.x(*shape), p.x(*shape))


def complex_fourier(p: Pick) -> Case:
    x = _complex(p)
    return Case(aten._fft_c2c.default, (x, [p.number(0, x.dim() - 1)], 0, p.flag()))


def fourier_to_real(p: Pick) -> Case:
    x = _complex(p)
    dim = p.number(0, x.dim() - 1)
    size = 2 * (x.shape[dim] - 1) or 1
    return Case(aten._fft_c2r.default, (x, [dim], 0, size))
