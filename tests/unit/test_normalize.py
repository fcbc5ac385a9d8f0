"""What normalize makes of ops that the partitioner could not reason about."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphpar.testing import assert_equivalent
from graphpar.types import Shard


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
