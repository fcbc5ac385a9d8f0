"""localize: ops that divide by a number of elements, when their elements are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.testing import assert_equivalent

LOSSES: list[Callable[..., Tensor]] = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
]


class Paired(nn.Module):
    """The loss of two hidden layers, both sharded along their width."""

    def __init__(self, loss: Callable[..., Tensor], reduction: str) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 16)
        self.loss, self.reduction = loss, reduction

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        left, right = torch.sigmoid(self.left(h)), torch.sigmoid(self.right(h))
        return self.loss(left, right, reduction=self.reduction)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.__name__))
def test_losses_over_a_sharded_width(loss: Callable[..., Tensor], reduction: str, sp: bool) -> None:
    torch.manual_seed(0)
    model = Paired(loss, reduction).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    assert_equivalent(model, (x,), tp=2, sp=sp, atol=1e-12, rtol=1e-12)
