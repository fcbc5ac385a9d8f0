"""What normalize makes of ops that the partitioner could not reason about."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphpar.testing import assert_equivalent
from graphpar.types import Shard

aten = torch.ops.aten


class Rotating(nn.Module):
    """Rotates the first ``part`` numbers of each head, here all: what passes is empty."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part = part
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (4, 8))
        turned, passed = heads[..., : self.part], heads[..., self.part :]
        y = torch.cat([turned.flip(-1) * 2, passed], dim=-1)
        return self.down(y.flatten(-2))  # type: ignore[no-any-return]


def test_operands_without_elements_do_not_keep_axes_whole() -> None:
    for part in (8, 0, 5):
        model = Rotating(part).double()
        x = torch.randn(3, 6, dtype=torch.float64)
        program = assert_equivalent(model, (x,), tp=2, atol=1e-12).program
        assert isinstance(program.state["up.weight"].type, Shard), part
        assert isinstance(program.state["down.weight"].type, Shard), part
        ops = {str(n.target) for n in program.graph.nodes}
        assert "graphpar.all_gather.default" not in ops, part


class Convolutions(nn.Module):
    """The first's channels are sharded, so the second sums over them; the third is between."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.each(self.into(x)).relu())  # type: ignore[no-any-return]


def test_biases_of_convolutions_are_added_after_a_reduction_only() -> None:
    model, x = Convolutions().double(), torch.randn(2, 3, 7, 7, dtype=torch.float64)
    program = assert_equivalent(model, (x,), tp=2, atol=1e-12).program
    into, each, out = (n for n in program.graph.nodes if n.target is aten.conv2d.default)
    assert [str(n.args[2]) for n in (into, each)] == ["into_bias", "each_bias"]
    assert out.args[2] is None
    (reduced,) = out.users
    (total,) = reduced.users
    assert (str(reduced.target), total.target) == (
        "graphpar.all_reduce.default",
        aten.add.Tensor,
    )
    assert not any(n.target is aten.view.default and not n.users for n in program.graph.nodes)
