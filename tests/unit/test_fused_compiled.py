"""C50 under a compiler: a gathered tensor is not kept, whichever way the graph is partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)

from graphpar import ops
from graphpar.cost import SavedTensors
from tests.unit.recompute_checks import one_of

RANKS, ROWS, WIDTH = 4, 64, 32


def layer(x: Tensor, weights: list[Tensor], down: Tensor, group: str) -> Tensor:
    left, right = ops.gather_linear(x, weights, [], 0, [ROWS], group)
    return ops.linear_scatter((left * right).sigmoid(), down, None, 0, [ROWS], group)


def gathers(graph: fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if "_c10d" in name and "wait" not in name]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_the_gathered_tensor_is_not_kept(partition: Callable[..., Any]) -> None:
    graphs: list[fx.GraphModule] = []

    def run(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    torch.manual_seed(0)
    x = torch.randn(ROWS // RANKS, WIDTH, requires_grad=True)
    weights = [torch.randn(48, WIDTH, requires_grad=True) for _ in range(2)]
    down = torch.randn(WIDTH, 48, requires_grad=True)
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    kept, gradients = [], []
    with one_of(RANKS) as group:
        for forward in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
            with SavedTensors([*weights, down]) as saved:
                y = forward(x, weights, down, group)
                kept.append(saved.nbytes)
            gradients.append(torch.autograd.grad(y.sum(), [x, *weights, down]))
    assert kept[1] == kept[0] == x.nbytes + 3 * ROWS * 48 * 4  # left, right and the sigmoid
    first, second = map(gathers, graphs)
    assert first == ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert second.count("all_gather_into_tensor") == 2
    assert second.count("reduce_scatter_tensor") == 1
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
