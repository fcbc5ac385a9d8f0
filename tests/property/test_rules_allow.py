"""What the main rules allow: a rule that by mistake allows nothing is right, and useless.

Each row is a call and all its strategies for two ranks with one axis cut (or one in each of the
parts that the op makes or joins) and one block in it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpar.passes.rules import op_axes, partial_strategies
from tests.property.rule_checks import Case, Target, node_of, show, strategies

aten = torch.ops.aten
HALVES = "S1(4,4) -> S1 S1"


def x(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


def i(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


ALLOWED: list[tuple[Target, tuple[Any, ...], dict[str, Any], str]] = [
    (
        aten.linear.default,
        (x(2, 4, 6), x(8, 6)),
        {},
        "S0 R -> S0, S1 R -> S1, S2 S1 -> P, R S0 -> S2, P R -> P, R P -> P",
    ),
    (
        aten.linear.default,
        (x(2, 4, 6), x(8, 6), x(8)),
        {},
        "S0 R R -> S0, S1 R R -> S1, R S0 S0 -> S2, P R P -> P, R P P -> P",
    ),
    (
        aten.addmm.default,
        (x(8), x(4, 6), x(6, 8)),
        {},
        "R S0 R -> S0, S0 R S1 -> S1, P P R -> P, P R P -> P",
    ),
    (
        aten.baddbmm.default,
        (x(2, 1, 8), x(2, 4, 6), x(2, 6, 8)),
        {},
        "S0 S0 S0 -> S0, R S1 R -> S1, S2 R S2 -> S2, P P R -> P, P R P -> P",
    ),
    (aten.addmv.default, (x(), x(4, 6), x(6)), {}, "R S0 R -> S0, P P R -> P, P R P -> P"),
    (
        aten.mm.default,
        (x(4, 6), x(6, 8)),
        {},
        "S0 R -> S0, S1 S0 -> P, R S1 -> S1, P R -> P, R P -> P",
    ),
    (
        aten.bmm.default,
        (x(2, 4, 6), x(2, 6, 8)),
        {},
        "S0 S0 -> S0, S1 R -> S1, S2 S1 -> P, R S2 -> S2, P R -> P, R P -> P",
    ),
    (
        aten.matmul.default,
        (x(2, 1, 4, 6), x(6, 6, 8)),
        {},
        "S0 R -> S0, R S0 -> S1, S2 R -> S2, S3 S1 -> P, R S2 -> S3, P R -> P, R P -> P",
    ),
    (
        aten.matmul.default,
        (x(2, 4, 6), x(6)),
        {},
        "S0 R -> S0, S1 R -> S1, S2 S0 -> P, P R -> P, R P -> P",
    ),
    (aten.dot.default, (x(6), x(6)), {}, "S0 S0 -> P, P R -> P, R P -> P"),
    (
        aten.einsum.default,
        ("bqhd,bkhd->bhqk", [x(2, 4, 6, 8), x(2, 2, 6, 8)]),
        {},
        "S0 S0 -> S0, S1 R -> S2, S2 S2 -> S1, S3 S3 -> P, R S1 -> S3, P R -> P, R P -> P",
    ),
    (
        aten.einsum.default,
        ("cb,ba", [x(2, 4), x(4, 6)]),
        {},
        "R S1 -> S0, S1 S0 -> P, S0 R -> S1, P R -> P, R P -> P",
    ),
    (aten.einsum.default, ("ab,ac->a", [x(2, 4), x(2, 6)]), {}, "S0 S0 -> S0, P R -> P, R P -> P"),
    (
        aten.conv2d.default,
        (x(2, 4, 5, 5), x(6, 4, 3, 3)),
        {},
        "S0 R -> S0, S1 S1 -> P, R S0 -> S1, P R -> P, R P -> P",
    ),
    (
        aten.native_group_norm.default,
        (x(2, 8, 3), x(8), x(8), 2, 8, 3, 4, 1e-5),
        {},
        "S0 R R -> S0 S0 S0, S1 S0 S0 -> S1 S1 S1",
    ),
    (aten._weight_norm_interface.default, (x(4, 6), x(4, 1)), {}, "S0 S0 -> S0 S0"),
    (
        aten.conv1d.default,
        (x(2, 4, 5), x(8, 1, 3), x(8), [1], [1], [1], 4),
        {},
        "S0 R R -> S0, S1 S0 S0 -> S1, R S0(2,2,2,2) S0(2,2,2,2) -> S1(2,2,2,2)",
    ),
    (
        aten.scaled_dot_product_attention.default,
        (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 2)),
        {},
        "S0 S0 S0 -> S0, S1 S1 S1 -> S1, S2 R R -> S2, R R S3 -> S3, R R P -> P",
    ),
    (
        aten.scaled_dot_product_attention.default,
        (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 2), None, 0.0, True),
        {},
        "S0 S0 S0 -> S0, S1 S1 S1 -> S1, R R S3 -> S3, R R P -> P",
    ),
    (
        aten.scaled_dot_product_attention.default,
        (x(2, 4, 6, 8), x(2, 4, 3, 8), x(2, 4, 3, 2), x(4, 6, 3)),
        {},
        "S0 S0 S0 R -> S0, S1 S1 S1 S0 -> S1, S2 R R S1 -> S2, R R S3 R -> S3, R R P R -> P",
    ),
    (
        aten.scaled_dot_product_attention.default,
        (x(3, 8, 5, 7), x(3, 2, 3, 7), x(3, 2, 3, 5), x(1, 8, 1, 3)),
        {"enable_gqa": True},
        "S1 S1 S1 S1 -> S1, S1(4,4) R R S1(4,4) -> S1(4,4), R R P R -> P",
    ),
    (aten.layer_norm.default, (x(2, 4, 6), [6], x(6), x(6)), {}, "S0 R R -> S0, S1 R R -> S1"),
    (aten.rms_norm.default, (x(2, 4, 6), [6], x(6)), {}, "S0 R -> S0, S1 R -> S1"),
    (
        aten.batch_norm.default,
        (x(2, 4, 6), x(4), x(4), None, None, True, 0.1, 1e-5, False),
        {},
        "S1 S0 S0 -> S1",
    ),
    (
        aten.batch_norm.default,
        (x(2, 4, 6), x(4), x(4), x(4), x(4), False, 0.1, 1e-5, False),
        {},
        "S0 R R R R -> S0, S1 S0 S0 S0 S0 -> S1, S2 R R R R -> S2",
    ),
    (aten.cross_entropy_loss.default, (x(4, 6), i(4), None, 0), {}, "S0 S0 -> S0, S1 R -> I"),
    (aten.cross_entropy_loss.default, (x(4, 6), i(4), None, 1), {}, "S1 R -> I"),
    (
        aten.cross_entropy_loss.default,
        (x(4, 6), i(4), x(6), 2),
        {},
        "S0 S0 R -> P, S1 R S0 -> I",
    ),
    (
        aten.cross_entropy_loss.default,
        (x(4, 6, 2), i(4, 2), None, 2),
        {},
        "S0 S0 -> P, S1 R -> I, S2 S1 -> P",
    ),
    (aten.cross_entropy_loss.default, (x(6), i(), None, 1), {}, "S0 R -> I"),
    (aten.cross_entropy_loss.default, (x(4, 6), x(4, 6), None, 1), {}, "S0 S0 -> P, R P -> P"),
    (
        aten.cross_entropy_loss.default,
        (x(4, 6), x(4, 6), None, 0),
        {},
        "S0 S0 -> S0, R P -> P",
    ),
    (aten.nll_loss_nd.default, (x(4, 6), i(4), x(6), 0), {}, "S0 S0 R -> S0, S1 R R -> P"),
    (aten.nll_loss_nd.default, (x(4, 6), i(4)), {}, "S1 R -> P"),
    (aten.log_softmax.int, (x(2, 4), -1), {}, "S0 -> S0, S1 -> S1"),
    (aten.mse_loss.default, (x(4, 6), x(4, 6)), {}, "S0 S0 -> P, S1 S1 -> P"),
    (aten.mse_loss.default, (x(4, 6), x(6), 0), {}, "S0 R -> S0, S1 S0 -> S1"),
    (aten.binary_cross_entropy.default, (x(4), x(4), x(4)), {}, "S0 S0 S0 -> P"),
    # images
    (
        aten.convolution.default,
        (x(2, 4, 5), x(6, 2, 3), None, [1], [0], [1], False, [0], 2),
        {},
        "S0 R -> S0, S1 S0 -> S1, S1(2,2) S1 -> P, P R -> P, R P -> P",
    ),
    (
        aten.pixel_shuffle.default,
        (x(2, 8, 4, 6), 2),
        {},
        "S0 -> S0, S1 -> S1, S2 -> S2, S3 -> S3, P -> P",
    ),
    (
        aten.pixel_unshuffle.default,
        (x(2, 2, 4, 8), 2),
        {},
        "S0 -> S0, S1 -> S1, S2 -> S2, S3 -> S3, P -> P",
    ),
    # views
    (aten.view.default, (x(4, 6, 2), [24, 2]), {}, "S0 -> S0, S1 -> S0(6,6,6,6), S2 -> S1, P -> P"),
    (aten.view.default, (x(3, 24), [3, 4, -1]), {}, "S1 -> S1, S1(6,6,6,6) -> S2, P -> P"),
    (aten.view.default, (x(4, 9), [3, 12]), {}, "P -> P"),
    (aten.view.default, (x(4, 3, 5), [4, 5, 3]), {}, "S0 -> S0, P -> P"),
    (aten.view.default, (x(4, 3, 6), [4, 9, 2]), {}, "S0 -> S0, S2(2,2,2) -> S2, P -> P"),
    (aten.flatten.using_ints, (x(2, 3, 4), 1), {}, "S0 -> S0, S2 -> S1(4,4,4), P -> P"),
    (aten.unflatten.int, (x(5, 8), 1, [2, 4]), {}, "S1 -> S1, S1(4,4) -> S2, P -> P"),
    (aten.squeeze.default, (x(4, 1, 6),), {}, "P -> P"),
    (aten.squeeze.dims, (x(4, 1, 6), [0, 1]), {}, "S0 -> S0, S2 -> S1, P -> P"),
    (aten.squeeze.dim, (x(4, 1, 6), 0), {}, "S2 -> S2, P -> P"),
    (aten.squeeze.dim, (x(4, 1, 6), 1), {}, "S0 -> S0, S2 -> S1, P -> P"),
    (aten.unsqueeze.default, (x(4, 6), 1), {}, "S0 -> S0, S1 -> S2, P -> P"),
    (aten.permute.default, (x(2, 4, 6), [2, 0, -2]), {}, "S0 -> S1, S1 -> S2, S2 -> S0, P -> P"),
    (aten.transpose.int, (x(2, 4), 0, -1), {}, "S0 -> S1, S1 -> S0, P -> P"),
    (aten.expand.default, (x(2, 1), [4, -1, 6]), {}, "S0 -> S1, R -> S0, R -> S2, P -> P"),
    (aten.repeat.default, (x(2, 4), [1, 3]), {}, "S0 -> S0, S1 -> S1(4,4,4), P -> P"),
    (aten.repeat_interleave.self_int, (x(2, 4), 3, 1), {}, "S0 -> S0, S1 -> S1, P -> P"),
    # parts
    (aten.split.Tensor, (x(3, 8), 4, 1), {}, f"{HALVES}, P -> P P"),
    (aten.chunk.default, (x(3, 8), 2, -1), {}, f"{HALVES}, P -> P P"),
    (
        aten.split_with_sizes.default,
        (x(4, 8), [6, 2], 1),
        {},
        "S0 -> S0 S0, S1(6,2) -> S1 S1, P -> P P",
    ),
    (aten.split_with_sizes.default, (x(3, 8), [8], 1), {}, "S1 -> S1, P -> P"),
    (aten.slice.Tensor, (x(4, 8), 1, 2, 6), {}, "S0 -> S0, S1(2,4,2) -> S1, P -> P"),
    (aten.slice.Tensor, (x(4, 8), 1, 0, 8, 2), {}, "S0 -> S0, S1 -> S1, P -> P"),
    (aten.slice.Tensor, (x(4, 8), 1, 1, 8, 4), {}, "S0 -> S0, S1 -> S1, P -> P"),
    (aten.slice.Tensor, (x(4, 9), 1, 1, 9, 2), {}, "S0 -> S0, P -> P"),
    (aten.narrow.default, (x(4, 8), 1, 0, 2), {}, "S0 -> S0, S1(2,6) -> S1, P -> P"),
    (aten.select.int, (x(4, 6), 1, -1), {}, "S0 -> S0, P -> P"),
    (aten.unbind.int, (x(4, 2), 1), {}, "S0 -> S0 S0, P -> P P"),
    (aten.cat.default, ([x(4, 2), x(4, 6)], 1), {}, "S0 S0 -> S0, S1 S1 -> S1(2,6), P P -> P"),
    (aten.stack.default, ([x(4, 6), x(4, 6)], 1), {}, "S0 S0 -> S0, S1 S1 -> S2, P P -> P"),
    # reductions
    (aten.sum.dim_IntList, (x(2, 4, 6), [0, -1]), {}, "S0 -> P, S1 -> S0, S2 -> P, P -> P"),
    (aten.sum.default, (x(4),), {}, "S0 -> P, P -> P"),
    (aten.mean.dim, (x(2, 4), [1], True), {}, "S0 -> S0, S1 -> P, P -> P"),
    (aten.amax.default, (x(2, 4), [-1]), {}, "S0 -> S0"),
    (aten.argmax.default, (x(2, 4), -1), {}, "S0 -> S0"),
    (aten.max.dim, (x(2, 4), 0), {}, "S1 -> S0 S0"),
    (aten.var.correction, (x(2, 4), [1]), {"correction": 0, "keepdim": True}, "S0 -> S0"),
    (aten.linalg_vector_norm.default, (x(2, 4), 2, [1]), {}, "S0 -> S0"),
    (aten.linalg_vector_norm.default, (x(2, 4), 1, [1]), {}, "S0 -> S0, S1 -> P"),
    (aten.rot90.default, (x(2, 4), 1), {}, "S0 -> S1, P -> P"),
    (aten.softmax.int, (x(2, 4), -1), {}, "S0 -> S0"),
    (aten.cumsum.default, (x(2, 4), 1), {}, "S0 -> S0, P -> P"),
    (aten.topk.default, (x(2, 4), 2), {}, "S0 -> S0 S0"),
    (aten.sort.default, (x(2, 4),), {}, "S0 -> S0 S0"),
    (aten.constant_pad_nd.default, (x(2, 4), [1, 0]), {}, "S0 -> S0, P -> P"),
    (aten.constant_pad_nd.default, (x(2, 4), [1, -1], 2.0), {}, "S0 -> S0"),
    (aten.pad.default, (x(2, 4), [1, 0], "circular"), {}, "S0 -> S0, P -> P"),
    (aten.flip.default, (x(2, 4), [1]), {}, "S0 -> S0, P -> P"),
    (
        aten.diff.default,
        (x(2, 4), 1, 1, x(2, 1), x(2, 2)),
        {},
        "S0 S0 S0 -> S0, P P P -> P",
    ),
    # lookups
    (
        aten.embedding.default,
        (x(6, 8), i(2, 4)),
        {},
        "S0 R -> P, R S0 -> S0, R S1 -> S1, S1 R -> S2, P R -> P",
    ),
    (
        aten.embedding.default,
        (x(6, 8), i(4), -1, True),
        {},
        "S1 R -> S1, P R -> P",
    ),
    (
        aten.embedding.default,
        (x(6, 8), i(4), -1, False, True),
        {},
        "R S0 -> S0, S1 R -> S1, P R -> P",
    ),
    (
        aten.gather.default,
        (x(2, 6), 1, i(2, 4)),
        {},
        "S0 S0 -> S0, S1 R -> P, R S1 -> S1, P R -> P",
    ),
    (aten.index_select.default, (x(2, 6), 1, i(4)), {}, "S0 R -> S0, R S0 -> S1, P R -> P"),
    (
        aten.index.Tensor,
        (x(2, 4, 6), [None, i(8)]),
        {},
        "S0 R -> S0, R S0 -> S1, S2 R -> S2, P R -> P",
    ),
    (
        aten.index.Tensor,
        (x(3, 4, 5), [i(2), None, i(6, 1)]),
        {},
        "R S0 R -> S1, R R S0 -> S0, S1 R R -> S2, P R R -> P",
    ),
    (
        aten.index.Tensor,
        (x(2, 3, 4, 5), [None, i(6), None, i(6)]),
        {},
        "S0 R R -> S1, R S0 S0 -> S0, S2 R R -> S2, P R R -> P",
    ),
    (aten.scatter_add.default, (x(2, 6), 1, i(2, 4), x(2, 4)), {}, "S0 S0 S0 -> S0, P R P -> P"),
    (aten.scatter.value, (x(2, 6), 1, i(2, 1), 1.0), {}, "S0 S0 -> S0"),
    (aten.index_add.default, (x(6, 8), 0, i(4), x(4, 8)), {}, "S1 R S1 -> S1, P R P -> P"),
    (
        aten.index_put.default,
        (x(2, 4, 8, 6), [None, None, i(3)], x(2, 4, 3, 6)),
        {},
        "S0 R S0 -> S0, S1 R S1 -> S1, S3 R S3 -> S3, P R P -> P",
    ),
    (
        aten.index_put.default,
        (x(2, 4, 6), [i(3), None, i(3)], x(3, 4)),
        {},
        "S1 R R S1 -> S1, P R R P -> P",
    ),
    (aten.slice_scatter.default, (x(2, 6), x(2, 3), 1, 0, 3), {}, "S0 S0 -> S0, P P -> P"),
    (aten.select_scatter.default, (x(2, 6), x(2), 1, 0), {}, "S0 S0 -> S0, P P -> P"),
    (aten.one_hot.default, (i(2, 4), 6), {}, "S0 -> S0, S1 -> S1"),
    # pointwise
    (aten.gelu.default, (x(2, 4),), {}, "S0 -> S0, S1 -> S1"),
    (aten.dropout.default, (x(2, 4), 0.0, True), {}, "S0 -> S0, S1 -> S1, P -> P"),
    (aten.dropout.default, (x(2, 4), 0.5, True), {}, "S0 -> S0, S1 -> S1"),
    (aten.detach.default, (x(2),), {}, "S0 -> S0, P -> P"),
    (aten.add.Tensor, (x(2, 4), x(2, 4)), {}, "S0 S0 -> S0, S1 S1 -> S1, P P -> P"),
    (aten.add.Tensor, (x(2, 4), x(4)), {}, "S0 R -> S0, S1 S0 -> S1, P P -> P"),
    (aten.add.Tensor, (x(2, 4), 1.0), {}, "S0 -> S0, S1 -> S1"),
    (aten.mul.Tensor, (x(2, 4), x(2, 1)), {}, "S0 S0 -> S0, S1 R -> S1, P R -> P, R P -> P"),
    (aten.mul.Tensor, (x(2, 4), i(4) > 0), {}, "S0 R -> S0, S1 S0 -> S1, P R -> P"),
    (aten.div.Tensor, (x(2), 2.0), {}, "S0 -> S0, P -> P"),
    (aten.where.self, (i(4) > 0, x(2, 4), x(2, 1)), {}, "R S0 S0 -> S0, S0 S1 R -> S1"),
    (aten.masked_fill.Scalar, (x(2, 4), i(2, 1) > 0, 0.0), {}, "S0 S0 -> S0, S1 R -> S1"),
    (aten.to.dtype, (x(2), torch.float32), {}, "S0 -> S0, P -> P"),
    (aten.to.dtype, (x(2), torch.int64), {}, "S0 -> S0"),
    (aten.to.dtype, (i(2), torch.float64), {}, "S0 -> S0, P -> P"),
    (aten.new_zeros.default, (x(2), [2, 4]), {}, ""),
    (aten.arange.default, (4,), {}, ""),
]


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    ALLOWED,
    ids=[f"{row[0]}-{n}" for n, row in enumerate(ALLOWED)],
)
def test_a_rule_allows(
    target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    node, _ = node_of(Case(target, args, kwargs))
    op = op_axes(node)
    found = [
        show(strategy)
        for cuts, strategy in strategies(op, 2)
        if all(len(blocks) == 1 and blocks[0] % 2 == 0 for blocks in cuts.values())
    ]
    found += map(show, partial_strategies(op))
    assert sorted(found) == sorted(expected.split(", ") if expected else [])
