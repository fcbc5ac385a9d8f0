"""Random calls of every op that has a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.property import cases_elements as elements
from tests.property import cases_products as products
from tests.property import cases_shapes as shapes
from tests.property.rule_checks import Case, Maker, Target

aten = torch.ops.aten


def creation(target: Target, *args: Any, new: bool = False) -> Maker:
    return lambda p: Case(target, (*([p.x(4, 4)] if new else []), *args))


def triangle(target: Target) -> Maker:
    return lambda p: Case(target, (p.x(*p.shape(2, 4)), p.number(-1, 1)))


CASES: Mapping[Target, Maker | tuple[Maker, ...]] = {
    aten.linear.default: products.linear,
    aten.addmm.default: products.addmm,
    aten.mm.default: products.mm,
    aten.bmm.default: products.bmm,
    aten.mv.default: products.mv,
    aten.dot.default: products.dot,
    aten.matmul.default: products.matmul,
    aten.einsum.default: (products.einsum, products.einsum_usual),
    aten.conv1d.default: products.convolution(1, aten.conv1d.default),
    aten.conv2d.default: products.convolution(2, aten.conv2d.default),
    aten.conv3d.default: products.convolution(3, aten.conv3d.default),
    aten.scaled_dot_product_attention.default: (
        products.attention,
        products.attention_of_broadcast_batches,
    ),
    aten.layer_norm.default: products.norm(aten.layer_norm.default, bias=True),
    aten.rms_norm.default: products.norm(aten.rms_norm.default, bias=False),
    aten.batch_norm.default: products.batch_norm,
    aten._native_batch_norm_legit_functional.default: products.batch_norm_functional,
    aten.cross_entropy_loss.default: (products.cross_entropy, products.cross_entropy_other),
    aten.nll_loss_nd.default: products.class_loss(aten.nll_loss_nd.default),
    aten.mse_loss.default: products.loss(aten.mse_loss.default),
    aten.l1_loss.default: products.loss(aten.l1_loss.default),
    aten.smooth_l1_loss.default: products.loss(aten.smooth_l1_loss.default, 0.5),
    aten.huber_loss.default: products.loss(aten.huber_loss.default, 0.5),
    aten.binary_cross_entropy.default: products.binary_loss(aten.binary_cross_entropy.default),
    aten.binary_cross_entropy_with_logits.default: products.binary_loss(
        aten.binary_cross_entropy_with_logits.default, None
    ),
    aten.view.default: shapes.reshape(aten.view.default),
    aten.reshape.default: shapes.reshape(aten.reshape.default),
    aten._unsafe_view.default: shapes.reshape(aten._unsafe_view.default),
    aten.flatten.using_ints: shapes.flatten,
    aten.unflatten.int: shapes.unflatten,
    aten.squeeze.default: shapes.squeeze,
    aten.squeeze.dim: shapes.squeeze,
    aten.squeeze.dims: shapes.squeeze,
    aten.unsqueeze.default: shapes.unsqueeze,
    aten.permute.default: shapes.permute,
    aten.transpose.int: shapes.transpose,
    aten.t.default: shapes.reverse,
    aten.numpy_T.default: shapes.reverse,
    aten.expand.default: shapes.expand,
    aten.repeat.default: shapes.repeat,
    aten.repeat_interleave.self_int: shapes.repeat_interleave,
    aten.view_as_complex.default: shapes.view_as_complex,
    aten.view_as_real.default: shapes.view_as_real,
    aten.split.Tensor: shapes.split(aten.split.Tensor),
    aten.split_with_sizes.default: shapes.split(aten.split_with_sizes.default),
    aten.split.sizes: shapes.split(aten.split.sizes),
    aten.chunk.default: shapes.split(aten.chunk.default),
    aten.slice.Tensor: shapes.slice_,
    aten.narrow.default: shapes.narrow,
    aten.select.int: shapes.select,
    aten.unbind.int: shapes.unbind,
    aten.cat.default: shapes.cat,
    aten.stack.default: shapes.stack,
    aten.sum.default: elements.reduce_all(aten.sum.default),
    aten.sum.dim_IntList: (elements.reduce_dims(aten.sum.dim_IntList), elements.sum_of_integers),
    aten.mean.default: elements.reduce_all(aten.mean.default),
    aten.mean.dim: elements.reduce_dims(aten.mean.dim),
    aten.amax.default: elements.reduce_dims(aten.amax.default, none=False),
    aten.amin.default: elements.reduce_dims(aten.amin.default, none=False),
    aten.max.default: elements.reduce_all(aten.max.default),
    aten.min.default: elements.reduce_all(aten.min.default),
    aten.max.dim: elements.reduce_dim(aten.max.dim),
    aten.min.dim: elements.reduce_dim(aten.min.dim),
    aten.argmax.default: elements.reduce_dim(aten.argmax.default, none=True),
    aten.argmin.default: elements.reduce_dim(aten.argmin.default, none=True),
    aten.all.default: elements.reduce_bools(aten.all.default),
    aten.all.dim: elements.reduce_dim(aten.all.dim, bools=True),
    aten.any.default: elements.reduce_bools(aten.any.default),
    aten.any.dim: elements.reduce_dim(aten.any.dim, bools=True),
    aten.prod.default: elements.reduce_all(aten.prod.default),
    aten.prod.dim_int: elements.reduce_dim(aten.prod.dim_int),
    aten.var.correction: elements.variance(aten.var.correction),
    aten.var.dim: elements.variance(aten.var.dim),
    aten.std.correction: elements.variance(aten.std.correction),
    aten.std.dim: elements.variance(aten.std.dim),
    aten.logsumexp.default: elements.logsumexp,
    aten.linalg_vector_norm.default: elements.reduce_dims(
        aten.linalg_vector_norm.default, before=(1, 2, 3, float("inf"))
    ),
    aten.norm.ScalarOpt_dim: elements.reduce_dims(
        aten.norm.ScalarOpt_dim, before=(1, 2, None), none=False
    ),
    aten.softmax.int: elements.along(aten.softmax.int),
    aten._softmax.default: elements.along(aten._softmax.default, False),
    aten.log_softmax.int: elements.along(aten.log_softmax.int),
    aten._log_softmax.default: elements.along(aten._log_softmax.default, False),
    aten.cumsum.default: elements.along(aten.cumsum.default),
    aten.cumprod.default: elements.along(aten.cumprod.default),
    aten.sort.default: (elements.along(aten.sort.default), elements.along(aten.sort.default, True)),
    aten.argsort.default: elements.along(aten.argsort.default),
    aten.flip.default: elements.flip,
    aten.topk.default: elements.topk,
    aten.diff.default: elements.diff,
    aten.pad.default: (elements.pad, elements.pad_mode),
    aten.constant_pad_nd.default: elements.constant_pad,
    aten.embedding.default: elements.embedding,
    aten.gather.default: elements.gather,
    aten.index_select.default: elements.index_select,
    aten.index.Tensor: elements.index,
    aten.scatter.src: elements.scatter(aten.scatter.src),
    aten.scatter.value: elements.scatter(aten.scatter.value),
    aten.scatter_add.default: elements.scatter(aten.scatter_add.default),
    aten.index_add.default: elements.index_add,
    aten.slice_scatter.default: elements.slice_scatter,
    aten.select_scatter.default: elements.select_scatter,
    aten.one_hot.default: elements.one_hot,
    # creation
    aten.arange.default: creation(aten.arange.default, 4),
    aten.arange.start: creation(aten.arange.start, 2, 8),
    aten.arange.start_step: creation(aten.arange.start_step, 2, 8, 2),
    aten.zeros.default: creation(aten.zeros.default, [4, 6]),
    aten.ones.default: creation(aten.ones.default, [4, 6]),
    aten.full.default: creation(aten.full.default, [4, 6], 2.0),
    aten.empty.memory_format: creation(aten.empty.memory_format, [4, 6]),
    aten.scalar_tensor.default: creation(aten.scalar_tensor.default, 2.0),
    aten.new_zeros.default: creation(aten.new_zeros.default, [4, 6], new=True),
    aten.new_ones.default: creation(aten.new_ones.default, [4, 6], new=True),
    aten.new_full.default: creation(aten.new_full.default, [4, 6], 2.0, new=True),
    aten.new_empty.default: creation(aten.new_empty.default, [4, 6], new=True),
    aten.tril.default: triangle(aten.tril.default),
    aten.triu.default: triangle(aten.triu.default),
    # pointwise, a choice
    aten.relu.default: elements.unary(aten.relu.default),
    aten.gelu.default: elements.unary(aten.gelu.default),
    aten.rsqrt.default: elements.unary(aten.rsqrt.default, positive=True),
    aten.neg.default: elements.unary(aten.neg.default),
    aten.pow.Tensor_Scalar: elements.unary(aten.pow.Tensor_Scalar, 2),
    aten.clamp.default: elements.unary(aten.clamp.default, -0.5, 0.5),
    aten.softplus.default: elements.unary(aten.softplus.default),
    aten.frexp.Tensor: elements.unary(aten.frexp.Tensor),
    aten.contiguous.default: elements.unary(aten.contiguous.default),
    aten.clone.default: elements.unary(aten.clone.default),
    aten.alias.default: elements.unary(aten.alias.default),
    aten.detach.default: elements.unary(aten.detach.default),
    aten.zeros_like.default: elements.unary(aten.zeros_like.default),
    aten.full_like.default: elements.unary(aten.full_like.default, 2.0),
    aten.dropout.default: (
        elements.unary(aten.dropout.default, 0.0, True),
        elements.unary(aten.dropout.default, 0.5, False),
    ),
    aten.mul.Scalar: elements.unary(aten.mul.Scalar, 3.0),
    aten.div.Scalar: elements.unary(aten.div.Scalar, 3.0),
    aten.add.Scalar: elements.unary(aten.add.Scalar, 3.0),
    aten.add.Tensor: (
        elements.binary(aten.add.Tensor),
        elements.with_alpha(aten.add.Tensor),
        elements.scalar(aten.add.Tensor),
    ),
    aten.sub.Tensor: (
        elements.binary(aten.sub.Tensor),
        elements.with_alpha(aten.sub.Tensor),
        elements.scalar(aten.sub.Tensor),
    ),
    aten.mul.Tensor: (
        elements.binary(aten.mul.Tensor),
        elements.scalar(aten.mul.Tensor),
        elements.mixed(aten.mul.Tensor),
    ),
    aten.div.Tensor: (
        elements.binary(aten.div.Tensor, "positive"),
        elements.scalar(aten.div.Tensor),
        elements.mixed(aten.div.Tensor),
    ),
    aten.maximum.default: elements.binary(aten.maximum.default),
    aten.gt.Tensor: elements.binary(aten.gt.Tensor),
    aten.eq.Tensor: elements.binary(aten.eq.Tensor, "ints"),
    aten.logical_and.default: elements.binary(aten.logical_and.default, "bools"),
    aten.bitwise_or.Tensor: elements.binary(aten.bitwise_or.Tensor, "bools"),
    aten.__and__.Tensor: elements.binary(aten.__and__.Tensor, "bools"),
    aten.where.self: elements.where,
    aten.masked_fill.Scalar: elements.masked_fill,
    aten.addcmul.default: elements.ternary(aten.addcmul.default),
    aten.lerp.Tensor: elements.ternary(aten.lerp.Tensor),
    aten.to.dtype: elements.cast,
    aten.type_as.default: elements.cast_as(aten.type_as.default),
    aten.to.other: elements.cast_as(aten.to.other),
}


def makers(target: Target) -> tuple[Maker, ...]:
    found = CASES[target]
    return found if isinstance(found, tuple) else (found,)
