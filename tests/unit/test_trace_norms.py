"""Norms of images with a dimension of size 1, for every order of the gradient's memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

import graphpar

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(6),
    "frozen": lambda: nn.BatchNorm2d(6).eval(),
    "plain": lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(6, affine=True),
}


def in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, with the dimensions in ``order`` in memory."""
    inverse = [order.index(i) for i in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


@pytest.mark.parametrize("shape", [(1, 6, 3, 4), (2, 6, 1, 5), (1, 6, 1, 5)])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_do_not_depend_on_strides(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = NORMS[name]().double()
    x, grad = torch.randn(2, *shape, dtype=torch.float64)
    model(x.requires_grad_()).backward(grad)
    expected = [x.grad, *(p.grad for p in model.parameters())]
    parallel = graphpar.transform(model, (x,), tp=1)
    for order in permutations(range(4)):
        for of_x in ((0, 1, 2, 3), (0, 2, 3, 1)):
            leaf = in_order(x.detach(), of_x).requires_grad_()
            inputs = [leaf, *parallel.parameters()]
            found = torch.autograd.grad(parallel(leaf), inputs, in_order(grad, order))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
