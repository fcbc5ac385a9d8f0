"""What the report says of uneven axes and of products that every rank does whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphpar.cli.counts import format_report
from graphpar.program import Program
from graphpar.testing import rewrite

ROWS = 6


class Net(nn.Module):
    """``inner`` units between two products, and a product of its own size."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.small = nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.down(self.up(x).relu()))  # type: ignore[no-any-return]


def rewritten(width: int, inner: int, tp: int) -> Program:
    return rewrite(Net(width, inner), (torch.randn(ROWS, width),), tp=tp)


def test_an_uneven_axis_and_a_whole_product() -> None:
    program = rewritten(3, 10, 4)
    report = program.report["partition"]
    (axis,), (product,) = report["uneven"], report["replicated"]
    work, small = 2 * (2 * ROWS * 3 * 10), 2 * ROWS * 3 * 2
    assert (axis.axis, axis.size, axis.most, axis.least) == ("up", 10, 3, 2)
    assert axis.flops == pytest.approx(work * (4 * 3 / 10 - 1))
    assert (product.op, product.flops) == ("aten.linear.default", 3 * small)
    assert "test_waste.py" in product.source
    wasted = axis.flops + product.flops
    assert report["wasted"] == pytest.approx(wasted / (work + small + wasted))
    assert format_report(program).splitlines()[:-1] == [
        "uneven: 10 of up, 3 or 2 on a rank",
        f"whole on every rank: aten.linear.default at {product.source}",
        f"wasted by these: {report['wasted']:.1%} of all ranks' work in products",
    ]


def test_nothing_is_wasted_where_ranks_divide() -> None:
    report = rewritten(4, 8, 2).report["partition"]
    assert (report["uneven"], report["replicated"], report["wasted"]) == ([], [], 0.0)
