"""What an op costs under a typing: its share of the work, and what it reduces by itself."""

from __future__ import annotations

import math

import torch
from torch import fx

from graphpar.axes import axes_of
from graphpar.cost import CostModel, is_contraction
from graphpar.ops.sharded import ALL_REDUCES
from graphpar.passes.rules import FORMS, Strategy, tensor_arguments
from graphpar.program import TensorSpec, info, tensor_spec
from graphpar.types import R, Shard, Type, largest_share, letter

aten = torch.ops.aten
CONVOLUTIONS = {
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.convolution.default,
}
_PREFER_INVARIANT_US = 1e-4


def strategy_us(
    node: fx.Node,
    operands: list[fx.Node],
    strategy: Strategy,
    flops: int,
    cost: CostModel,
    ranks: int,
) -> float:
    """One run of the op, of ``flops`` on the whole tensors, on ``operands`` of these types."""
    spec = info(node).spec
    results = [spec] if isinstance(spec, TensorSpec) else [s for s in spec or () if s]
    pairs = zip(
        [*map(tensor_spec, operands), *results],
        [*strategy.operands, *strategy.results],
        strict=True,
    )
    nbytes = sum(s.nbytes * part_of(t, ranks) for s, t in pairs)
    part = min(part_of(t, ranks) for t in (*strategy.operands, *strategy.results, R))
    us = cost.op_us(round(part * flops), round(nbytes))
    us += _reduction_us(node, operands, strategy, cost, ranks)
    if any(letter(t) == "R" for t in strategy.results):
        us += _PREFER_INVARIANT_US
    return us


def part_of(kind: Type, ranks: int) -> float:
    """The share of a value that the rank with the most holds."""
    return largest_share(kind, ranks) if isinstance(kind, Shard) else 1.0


def _reduction_us(
    node: fx.Node, operands: list[fx.Node], strategy: Strategy, cost: CostModel, ranks: int
) -> float:
    """What a form on shards reduces: about a number for each slice along the axis, every time."""
    op, kind = info(node).axes, strategy.operands[0] if operands else None
    if op is None or not op.reduced or not isinstance(kind, Shard):
        return 0.0
    if op.reduced.isdisjoint(axes_of(op.operands[0][kind.dim])):
        return 0.0
    assert isinstance(node.target, torch._ops.OpOverload)
    forward, backward = ALL_REDUCES[FORMS[node.target]]
    x = tensor_spec(operands[0])
    times = forward + (backward if x.differentiable else 0)
    return times * cost.collective_us("all_reduce", x.nbytes // x.shape[kind.dim], ranks)


def flops_of(node: fx.Node) -> int:
    """Multiply-adds times two of a product's forward; 0 for other ops."""
    if node.op != "call_function" or not is_contraction(node.target):
        return 0
    result = tensor_spec(node)
    operands = [tensor_spec(n) for n in tensor_arguments(node)]
    if node.target is aten.scaled_dot_product_attention.default:
        return 2 * operands[1].shape[-2] * (operands[0].numel + result.numel)
    if node.target in CONVOLUTIONS:
        return 2 * result.numel * math.prod(operands[1].shape[1:])
    op = info(node).axes
    assert op is not None
    # In a grouped product each row meets one group's matrix; of an opaque op no axes are known.
    if op.opaque or "grouped_mm" in str(node.target):
        return 2 * result.numel * max(operands[0].shape[-1:], default=1)
    kept = {dim for dims in op.results for dim in dims}
    summed = {dim for dims in op.operands for dim in dims} - kept
    return 2 * result.numel * math.prod(f.size for dim in summed for f in dim)
