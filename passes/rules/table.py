"""The table of rules, and how a rule is applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpar.axes import Axis, Dims, Freezer, OpAxes, TermDims, axes_of, fresh
from graphpar.errors import InputError
from graphpar.passes.rules import indexing, nn, parts, pointwise, reductions, spatial, views
from graphpar.passes.rules.call import Call, OpRule, Rule, call_of
from graphpar.passes.rules.einsum import einsum, whole_terms
from graphpar.passes.rules.forms import form_of, whole_op
from graphpar.program import MESH_DIM, info, per_rank, tensor_spec
from graphpar.types import Shard, Type, layout_arguments, local_shape

aten = torch.ops.aten


def replicated(call: Call) -> OpRule:
    """Creation ops and ops that run whole on every rank by intent: nothing may be cut."""
    results = [fresh(r.shape) for r in call.results]
    operands = [t for o in call.operands for t in whole_terms(o.dims)]
    return OpRule(results, whole=[*operands, *(t for r in results for t in whole_terms(r))])


RULES: Mapping[torch._ops.OpOverload, Rule] = {
    # contractions
    aten.linear.default: nn.linear,
    aten.addmm.default: nn.added_product("m k, k n -> m n"),
    aten.mm.default: nn.matmul,
    aten.bmm.default: nn.matmul,
    aten.mv.default: nn.matmul,
    aten.dot.default: nn.matmul,
    aten.vdot.default: nn.matmul,
    aten.baddbmm.default: nn.added_product("b m k, b k n -> b m n"),
    aten.addmv.default: nn.added_product("m k, k -> m"),
    aten._cdist_forward.default: nn.distances,
    aten._grouped_mm.default: nn.grouped_mm,
    aten.matmul.default: nn.matmul,
    aten.einsum.default: nn.torch_einsum,
    aten.conv1d.default: nn.convolution,
    aten.conv2d.default: nn.convolution,
    aten.conv3d.default: nn.convolution,
    aten.convolution.default: spatial.general_convolution,
    aten.scaled_dot_product_attention.default: nn.attention,
    # norms and losses
    aten.layer_norm.default: nn.layer_norm,
    aten.rms_norm.default: nn.layer_norm,
    aten.batch_norm.default: nn.batch_norm,
    aten._native_batch_norm_legit_functional.default: nn.batch_norm,
    aten.native_group_norm.default: spatial.group_norm,
    aten._weight_norm_interface.default: nn.weight_norm,
    aten.cross_entropy_loss.default: nn.cross_entropy,
    aten.nll_loss_nd.default: nn.nll_loss,
    aten.mse_loss.default: reductions.loss,
    aten.l1_loss.default: reductions.loss,
    aten.smooth_l1_loss.default: reductions.loss,
    aten.huber_loss.default: reductions.loss,
    aten.binary_cross_entropy.default: reductions.loss,
    aten.binary_cross_entropy_with_logits.default: reductions.loss,
    aten.soft_margin_loss.default: reductions.loss,
    # images and signals
    aten.avg_pool2d.default: spatial.resized(2, linear=True),
    aten.avg_pool3d.default: spatial.resized(3, linear=True),
    aten._adaptive_avg_pool2d.default: spatial.resized(2, linear=True),
    aten._adaptive_avg_pool3d.default: spatial.resized(3, linear=True),
    aten.avg_pool1d.default: spatial.resized(1, linear=True),
    aten.adaptive_avg_pool1d.default: spatial.resized(1, linear=True),
    aten.max_pool1d_with_indices.default: spatial.resized(1),
    aten.adaptive_max_pool1d.default: spatial.resized(1),
    aten.max_pool2d_with_indices.default: spatial.resized(2),
    aten.max_pool3d_with_indices.default: spatial.resized(3),
    aten.adaptive_max_pool2d.default: spatial.resized(2),
    aten.adaptive_max_pool3d.default: spatial.resized(3),
    aten.upsample_nearest1d.default: spatial.resized(1, linear=True),
    aten.upsample_nearest2d.default: spatial.resized(2, linear=True),
    aten.upsample_nearest3d.default: spatial.resized(3, linear=True),
    aten.upsample_linear1d.default: spatial.resized(1, linear=True),
    aten.upsample_bilinear2d.default: spatial.resized(2, linear=True),
    aten.upsample_bicubic2d.default: spatial.resized(2, linear=True),
    aten.upsample_trilinear3d.default: spatial.resized(3, linear=True),
    aten._upsample_nearest_exact1d.default: spatial.resized(1, linear=True),
    aten._upsample_nearest_exact2d.default: spatial.resized(2, linear=True),
    aten._upsample_nearest_exact3d.default: spatial.resized(3, linear=True),
    aten._upsample_bilinear2d_aa.default: spatial.resized(2, linear=True),
    aten._upsample_bicubic2d_aa.default: spatial.resized(2, linear=True),
    aten.grid_sampler_2d.default: spatial.grid_sampler,
    aten.grid_sampler_3d.default: spatial.grid_sampler,
    aten.pixel_shuffle.default: spatial.pixel_shuffle,
    aten.pixel_unshuffle.default: spatial.pixel_unshuffle,
    aten.channel_shuffle.default: spatial.channel_shuffle,
    aten.im2col.default: spatial.images,
    aten._fft_r2c.default: spatial.fourier,
    aten._fft_c2r.default: spatial.fourier,
    aten._fft_c2c.default: spatial.fourier,
    # views
    aten.view.default: views.reshape,
    aten.reshape.default: views.reshape,
    aten._unsafe_view.default: views.reshape,
    aten.flatten.using_ints: views.reshape,
    aten.unflatten.int: views.unflatten,
    aten.squeeze.default: views.squeeze,
    aten.squeeze.dim: views.squeeze,
    aten.squeeze.dims: views.squeeze,
    aten.unsqueeze.default: views.reshape,
    aten.permute.default: views.permute,
    aten.transpose.int: views.transpose,
    aten.t.default: views.reverse_dims,
    aten.numpy_T.default: views.reverse_dims,
    aten.expand.default: views.expand,
    aten.repeat.default: views.repeat,
    aten.repeat_interleave.self_int: views.repeat_interleave,
    aten.view_as_complex.default: views.view_as_complex,
    aten.view_as_real.default: views.view_as_real,
    aten.glu.default: views.glu,
    aten.diagonal.default: views.diagonal,
    aten.diagonal_copy.default: views.diagonal,
    aten.diag_embed.default: views.diag_embed,
    aten.unfold.default: views.unfold,
    aten.rot90.default: views.rot90,
    # parts
    aten.split.Tensor: parts.split,
    aten.split_with_sizes.default: parts.split,
    aten.split.sizes: parts.split,
    aten.chunk.default: parts.split,
    aten.slice.Tensor: parts.slice_,
    aten.narrow.default: parts.narrow,
    aten.select.int: parts.select,
    aten.unbind.int: parts.select,
    aten.cat.default: parts.cat,
    aten.stack.default: parts.stack,
    # reductions and ops along a dimension
    aten.sum.default: reductions.summed,
    aten.sum.dim_IntList: reductions.summed,
    aten.mean.default: reductions.mean,
    aten.mean.dim: reductions.mean,
    aten.amax.default: reductions.reduced_whole,
    aten.amin.default: reductions.reduced_whole,
    aten.max.default: reductions.reduced_whole,
    aten.min.default: reductions.reduced_whole,
    aten.max.dim: reductions.reduced_whole,
    aten.min.dim: reductions.reduced_whole,
    aten.argmax.default: reductions.reduced_whole,
    aten.argmin.default: reductions.reduced_whole,
    aten.all.default: reductions.reduced_whole,
    aten.all.dim: reductions.reduced_whole,
    aten.any.default: reductions.reduced_whole,
    aten.any.dim: reductions.reduced_whole,
    aten.any.dims: reductions.reduced_whole,
    aten.prod.default: reductions.reduced_whole,
    aten.prod.dim_int: reductions.reduced_whole,
    aten.var.correction: reductions.reduced_whole,
    aten.var.dim: reductions.reduced_whole,
    aten.var_mean.correction: reductions.reduced_whole,
    aten.std_mean.correction: reductions.reduced_whole,
    aten.std.correction: reductions.reduced_whole,
    aten.std.dim: reductions.reduced_whole,
    aten.logsumexp.default: reductions.reduced_whole,
    aten.linalg_vector_norm.default: reductions.norm,
    aten.norm.ScalarOpt_dim: reductions.norm,
    aten.aminmax.default: reductions.reduced_whole,
    aten.norm.Scalar: reductions.norm,
    aten.median.default: reductions.reduced_whole,
    aten.nanmedian.default: reductions.reduced_whole,
    aten.median.dim: reductions.reduced_whole,
    aten.nanmedian.dim: reductions.reduced_whole,
    aten.kthvalue.default: reductions.reduced_whole,
    aten.mode.default: reductions.reduced_whole,
    aten.count_nonzero.default: reductions.counted,
    aten.count_nonzero.dim_IntList: reductions.counted,
    aten.nansum.default: reductions.counted,
    aten.softmax.int: reductions.norm_like,
    aten._softmax.default: reductions.norm_like,
    aten._safe_softmax.default: reductions.norm_like,
    aten.log_softmax.int: reductions.log_softmax,
    aten._log_softmax.default: reductions.norm_like,
    aten.cumsum.default: reductions.cumulative,
    aten.cumprod.default: reductions.norm_like,
    aten.cummax.default: reductions.norm_like,
    aten.cummin.default: reductions.norm_like,
    aten.logcumsumexp.default: reductions.norm_like,
    aten.roll.default: reductions.roll,
    aten.sort.default: reductions.norm_like,
    aten.sort.stable: reductions.norm_like,
    aten.argsort.default: reductions.norm_like,
    aten.flip.default: reductions.flip,
    aten.topk.default: reductions.topk,
    aten.diff.default: reductions.diff,
    aten.pad.default: reductions.pad,
    aten.constant_pad_nd.default: reductions.pad,
    # lookups
    aten.embedding.default: indexing.embedding,
    aten._embedding_bag.default: indexing.embedding_bag,
    aten.gather.default: indexing.gather,
    aten.index_select.default: indexing.index_select,
    aten.index.Tensor: indexing.index,
    aten.scatter.src: indexing.scatter,
    aten.scatter.value: indexing.scatter,
    aten.scatter_add.default: indexing.scatter,
    aten.index_add.default: indexing.index_add,
    aten.index_copy.default: indexing.index_add,
    aten.index_fill.int_Scalar: indexing.index_fill,
    aten.index_fill.int_Tensor: indexing.index_fill,
    aten.index_put.default: indexing.index_put,
    aten.scatter_reduce.two: indexing.scatter,
    aten.slice_scatter.default: indexing.segment_scatter,
    aten.select_scatter.default: indexing.segment_scatter,
    aten.one_hot.default: indexing.one_hot,
    aten.bucketize.Tensor: indexing.bucketize,
    aten.searchsorted.Tensor: indexing.searchsorted,
    aten.isin.Tensor_Tensor: indexing.isin,
    # creation
    aten.arange.default: replicated,
    aten.arange.start: replicated,
    aten.arange.start_step: replicated,
    aten.zeros.default: replicated,
    aten.ones.default: replicated,
    aten.full.default: replicated,
    aten.empty.memory_format: replicated,
    aten.scalar_tensor.default: replicated,
    aten.histc.default: replicated,
    aten.eye.default: replicated,
    aten.eye.m: replicated,
    aten.linspace.default: replicated,
    aten.new_zeros.default: replicated,
    aten.new_ones.default: replicated,
    aten.new_full.default: replicated,
    aten.new_empty.default: replicated,
    aten.tril.default: replicated,
    aten.triu.default: replicated,
}


# Ops that may not be defined here, by their qualified names.
_NAMED: dict[str, Rule] = {
    "transformers::grouped_mm_fallback": nn.grouped_mm,
    "graphpar_rnn::sparse_rnn": nn.recurrence,
}


def register_rule(op: str, formula: str, *, linear: bool = False) -> None:
    """Tell how an op of yours (a ``torch.library.custom_op``) may run on shards.

    Args:
        op: its qualified name, ``"mylib::my_op"``.
        formula: one term per tensor argument, then one per result, as in
            ``"... k, n k -> ... n"``: a letter names a dimension, ``...`` leading ones; a letter
            that no result has is summed over, and one in brackets must stay whole. The op must do
            the same on a part of a dimension that is not in brackets as on the whole of it.
        linear: whether the op is linear in each floating tensor argument; if not, no dimension
            that is summed over may be cut.

    Raises:
        InputError: the formula cannot be read.
    """
    if formula.count("->") != 1 or "::" not in op:
        raise InputError(f"{op!r}: {formula!r}; legal: 'library::op' and 'a b, b c -> a c'")

    def rule(call: Call) -> OpRule | None:
        if len(call.operands) != formula.split("->")[0].count(",") + 1:
            return None
        found = einsum(call, formula, call.operands, linear=linear)
        found.partial = [p for p in found.partial if _floating(call, p)]
        if not linear:
            found.whole, found.contracted = [*found.whole, *found.contracted], []
        return found

    _NAMED[op] = rule


def _floating(call: Call, places: set[int]) -> bool:
    dtypes = [call.operands[place].spec.dtype for place in places]
    return all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def rule_for(target: object) -> Rule | None:
    """The rule of an op; ``None`` if the op is opaque."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    rule = RULES.get(target) or _NAMED.get(target._schema.name)
    return rule or (pointwise.pointwise if pointwise.is_pointwise(target) else None)


def apply_rule(node: fx.Node, dims: Callable[[fx.Node], TermDims]) -> tuple[Call, OpRule | None]:
    """Apply the node's rule to its operands' axes, which are unified in place."""
    call = call_of(node, dims)
    rule = rule_for(call.target)
    specs = [*(o.spec for o in call.operands), *call.results]
    if rule is None or any(0 in spec.shape for spec in specs):
        return call, None
    return call, rule(call)


def freeze(freezer: Freezer, call: Call, rule: OpRule | None) -> OpAxes:
    """The rule's answer in immutable form; an opaque op gets fresh axes."""
    operands = tuple(freezer.dims(o.dims) for o in call.operands)
    if rule is None:
        fresh_results = tuple(freezer.dims(fresh(r.shape)) for r in call.results)
        return OpAxes(operands, fresh_results, opaque=True)
    results = tuple(freezer.dims(dims) for dims in rule.results)
    known = _axes_in(operands) | freezer.all_axes(rule.made)
    whole = freezer.all_axes(rule.whole) | (_axes_in(results) - known)
    return OpAxes(
        operands,
        results,
        whole=whole,
        contracted=freezer.all_axes(rule.contracted) - whole,
        reduced=freezer.all_axes(rule.reduced) - whole,
        partial=tuple(frozenset(p) for p in rule.partial if _keeps_addends(call, p)),
        average=rule.average,
        multiple=rule.multiple,
    )


def _axes_in(tensors: Iterable[Dims]) -> frozenset[Axis]:
    return frozenset(axis for dims in tensors for dim in dims for axis in axes_of(dim))


def _keeps_addends(call: Call, places: set[int]) -> bool:
    """Whether no addend is rounded: casts to integers and to booleans are not linear."""
    inputs = [call.operands[place].spec.dtype for place in places]
    outputs = [result.dtype for result in call.results]
    if torch.bool in (*inputs, *outputs):
        return False
    inexact = [d.is_floating_point or d.is_complex for d in outputs]
    return all(inexact) or not any(d.is_floating_point or d.is_complex for d in inputs)


def op_axes(node: fx.Node) -> OpAxes:
    """The op by itself, with fresh axes: what the verifier re-derives types from."""
    return freeze(Freezer(), *apply_rule(node, _fresh_dims()))


def summed_size(node: fx.Node) -> int:
    """How many elements the op adds, or takes the mean of, for each element of its result."""
    return math.prod(axis.size for axis in op_axes(node).contracted)


def _fresh_dims() -> Callable[[fx.Node], TermDims]:
    memo: dict[fx.Node, TermDims] = {}
    return lambda node: memo.setdefault(node, fresh(tensor_spec(node).shape))


def local_call(
    node: fx.Node, operands: Sequence[Type], results: Sequence[Type], ranks: int
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The op on one rank and its arguments: size arguments rewritten for sharded operands, or the
    op's own form on shards."""
    given, kwargs = info(node).whole_call or (node.args, node.kwargs)
    target, args = whole_op(node.target), tuple(given)
    if not any(isinstance(kind, Shard) for kind in (*operands, *results)):
        return target, args, dict(kwargs)
    call, rule = apply_rule(node, _fresh_dims())
    if rule is None:
        return target, args, dict(kwargs)
    kind = operands[0] if operands else None
    if isinstance(kind, Shard) and kind.dim in rule.own:
        every = _all_arguments(target, args, kwargs)
        return form_of(target), (*every, *layout_arguments(kind, MESH_DIM)), {}
    shapes = []
    for rank in range(ranks):
        inputs = zip(call.operands, operands, strict=True)
        outs = zip(call.results, results, strict=True)
        own = [[local_shape(v.shape, t, rank, ranks) for v, t in side] for side in (inputs, outs)]
        shapes.append(own)
    new_args, new_kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in rule.local:
            value = per_rank([rule.local[argument.name](*own) for own in shapes])
            if position < len(new_args):
                new_args[position] = value
            else:
                new_kwargs[argument.name] = value
    return target, tuple(new_args), new_kwargs


def _all_arguments(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments by position, defaults filled in."""
    rest = target._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default_value) for a in rest))
