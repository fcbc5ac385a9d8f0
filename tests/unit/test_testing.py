"""The tolerances that equality is tested with by default."""

import pytest
import torch
from torch import Tensor, nn

from graphpar.testing import assert_equivalent, compare, rewrite


class Net(nn.Module):
    """Two products; ``inside`` is the type of what is computed between them."""

    def __init__(self, dtype: torch.dtype, inside: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inside, self.scale = inside, 1.0
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        angle = torch.arange(h.shape[1], dtype=torch.float32).cos()  # carries no gradient
        h = h.to(self.inside).pow(2).mean(-1, keepdim=True).rsqrt().to(h.dtype) * h
        y: Tensor = self.second(h * angle[:, None].to(h.dtype))
        return y * self.scale


def net(dtype: torch.dtype, inside: torch.dtype) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(dtype, inside), torch.randn(4, 8, 16).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [(torch.float64, torch.float32), (torch.bfloat16, torch.float32), (torch.float32,) * 2],
)
def test_types_within_count(dtype: torch.dtype, inside: torch.dtype) -> None:
    model, x = net(dtype, inside)
    assert_equivalent(model, (x,), tp=2, sp=True)


@pytest.mark.parametrize(
    ("inside", "by"), [(torch.float64, 1e-8), (torch.float32, 1e-2)], ids=["float64", "float32"]
)
def test_what_is_beyond_is_found(inside: torch.dtype, by: float) -> None:
    model, x = net(torch.float64, inside)
    program = rewrite(model, (x,), tp=2, sp=True)
    compare(program, model, (x,))
    model.scale += by
    with pytest.raises(AssertionError, match="output 0 on rank 0 differs"):
        compare(program, model, (x,))
