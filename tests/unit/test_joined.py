"""Slices that become one split, and those that must not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphpar
from graphpar.joined import join_slices
from graphpar.program import Program

aten = torch.ops.aten


def ops_of(program: Program) -> list[object]:
    return [n.target for n in program.graph.nodes if n.op == "call_function"]


class Sliced(nn.Module):
    """``form``: what is done with the parts of an activation [4, 8]."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        if self.form == "rotated":
            return (torch.cat((-y[..., 4:], y[..., :4]), -1),)
        if self.form == "from behind":
            return (y[:, 5:].exp().sum() + torch.stack([y[:, 0:5], y[:, 0:5]]).sum(),)
        if self.form == "three":
            return (y[:3].exp().sum() * y[3:].exp().sum() + y[1:3].sin().sum(),)
        if self.form == "a gap":
            return (torch.cat((-y[..., 5:], y[..., :4]), -1),)
        if self.form == "overlapping":
            return (torch.cat((-y[..., 3:], y[..., :4]), -1),)
        if self.form == "given out":
            return y[..., 4:], y[..., :4].exp()
        assert self.form == "viewed"
        return (y[..., 4:].unsqueeze(0), y[..., :4].exp())


@pytest.mark.parametrize(
    ("form", "joined"),
    [
        ("rotated", True),
        ("a gap", False),
        ("overlapping", False),
        ("from behind", False),
        ("three", False),
        ("given out", False),
        ("viewed", False),
    ],
)
def test_slices_are_joined_where_they_make_up_a_tensor(form: str, joined: bool) -> None:
    torch.manual_seed(0)
    model, x = Sliced(form), torch.randn(4, 8, requires_grad=True)
    parallel = graphpar.transform(model, (x,), tp=1)
    before, after = ops_of(parallel.program), ops_of(join_slices(parallel.program))
    assert (aten.split_with_sizes.default in after) is joined
    assert (aten.slice.Tensor in after) is not joined
    assert aten.split_with_sizes.default not in before
    found, wanted = parallel(x), model(x)
    values = [found, torch.autograd.grad(sum(y.square().sum() for y in found), x)]
    others = [wanted, torch.autograd.grad(sum(y.square().sum() for y in wanted), x)]
    torch.testing.assert_close(values, others, rtol=0, atol=0)


def test_outputs_may_be_written_to() -> None:
    parallel = graphpar.transform(Sliced("given out"), (torch.randn(4, 8),), tp=1)
    with torch.no_grad():
        first, _ = parallel(torch.randn(4, 8))
    first.zero_()
    first, _ = parallel(torch.randn(4, 8))
    first.mul_(2).sum().backward()
