"""Ops that change nothing are dropped, and ops with several spellings get one.

``view`` becomes ``reshape``, casts become ``to.dtype``, ``zeros_like(x)`` becomes ``zeros`` of
its size (it reads nothing of ``x`` but its metadata). Values and layouts stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import is_non_overlapping_and_dense_or_false

from graphpar.trace.build import Builder, Call, argument, aten

Rule = Callable[[Builder, Call, Tensor], "fx.Node | Call | None"]


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two fake values agree in shape, strides and device."""
    if a.shape != b.shape or a.device != b.device:
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(s == t for size, s, t in strides if size > 1)


def _drop(b: Builder, call: Call, val: Tensor) -> fx.Node | None:
    """The input itself, if the op changes nothing."""
    node: fx.Node = call[1][0]
    source = b.facts[node].val
    return node if source.dtype == val.dtype and same_layout(source, val) else None


def _cast(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
    node: fx.Node = call[1][0]
    source = b.facts[node].val
    if not same_layout(source, val):
        return None
    return node if source.dtype == val.dtype else (aten.to.dtype, (node, val.dtype), {})


def _reshape(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
    target, (node, *sizes), _ = call
    if b.facts[node].val.shape == val.shape:
        return node if isinstance(node, fx.Node) else None
    size = list(val.shape) if target is aten.view_as.default else sizes[0]
    return (aten.reshape.default, (node, size), {})


def _expand(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
    target, args, _ = call
    node: fx.Node = args[0]
    if b.facts[node].val.shape == val.shape:
        return node
    if target is aten.expand_as.default:
        return (aten.expand.default, (node, list(val.shape)), {})
    return None


def _slice(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
    target, (node, *_), _ = call
    step = argument(call, "step", 1)
    if step == 1 and b.facts[node].val.shape == val.shape:
        return node if isinstance(node, fx.Node) else None
    dim, end = argument(call, "dim", 0), argument(call, "end")
    bounds = argument(call, "start") or 0, sys.maxsize if end is None else end
    return (target, (node, dim, *bounds, *([step] if step != 1 else [])), {})


def idle_dropout(call: Call) -> bool:
    """Whether the call is a dropout that returns its input."""
    if _RULES.get(call[0]) is not _dropout:
        return False
    return argument(call, "p", 0.5) == 0 or not argument(call, "train", True)


def _dropout(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
    node: fx.Node = call[1][0]
    idle = idle_dropout(call)
    if idle or call[0] is not aten.dropout.default:
        return node if idle else None
    # The mask is drawn in the order of the memory: spell that order out, so that it does not
    # depend on the strides that a rewritten program happens to have.
    source = b.facts[node].val
    if not is_non_overlapping_and_dense_or_false(source):
        return None  # the mask is contiguous
    rank = source.dim()
    order = sorted(range(rank), key=lambda d: -source.stride(d))
    order = _with_units_in_place(order, source)
    if order == list(range(rank)):
        return None
    inverse = sorted(range(rank), key=order.__getitem__)
    permuted = b.emit(aten.permute.default, (node, order))
    dropped = b.emit(aten.dropout.default, (permuted, *call[1][1:]), call[2])
    return b.emit(aten.permute.default, (dropped, inverse))


def _group_norm(b: Builder, call: Call, val: Any) -> Call:
    """The kernel refuses most orders of the memory: ask for the plain one, so that it does not
    depend on the strides that a rewritten program happens to have. Images that have channels last
    get the same up to the order of sums."""
    target, (node, *rest), kwargs = call
    return (target, (b.emit(aten.contiguous.default, (node,)), *rest), kwargs)


def _with_units_in_place(order: list[int], source: Tensor) -> list[int]:
    """``order`` with dimensions of size 1, whose strides mean nothing, where they are."""
    moving = iter([d for d in order if source.shape[d] != 1])
    return [d if source.shape[d] == 1 else next(moving) for d in range(source.dim())]


def _detach(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
    node: fx.Node = call[1][0]
    return None if b.grad(node) else node


def _creation(target: Any, fill: str = "") -> Rule:
    """``zeros_like``, ``new_full``, ... as a creation op of fixed size."""

    def rule(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
        if val.layout is not torch.strided or val.is_quantized:
            return None
        args: tuple[Any, ...] = (list(val.shape),)
        if fill:
            args = (*args, argument(call, fill))
        return (target, args, {"dtype": val.dtype, "device": val.device})

    return rule


def _random(target: Any) -> Rule:
    """Random numbers like a tensor, of which only the sizes matter; not where they fill memory of
    another order."""
    create = _creation(target)

    def rule(b: Builder, call: Call, val: Tensor) -> fx.Node | Call | None:
        return create(b, call, val) if val.is_contiguous() else None

    return rule


_ZEROS, _ONES = _creation(aten.zeros.default), _creation(aten.ones.default)

# Memory that is never initialised becomes zeros: what a model does not write, it must not read.
_RULES: dict[Any, Rule] = {
    aten.alias.default: _drop,
    aten.lift_fresh.default: _drop,
    aten.lift_fresh_copy.default: _drop,
    aten.clone.default: _drop,
    aten.contiguous.default: _drop,
    aten._to_copy.default: _cast,
    aten.type_as.default: _cast,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.to.other: _cast,
    aten.view.default: _reshape,
    aten.view_as.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    aten.slice.Tensor: _slice,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.alpha_dropout.default: _dropout,
    aten.feature_alpha_dropout.default: _dropout,
    aten.native_group_norm.default: _group_norm,
    aten.detach.default: _detach,
    aten.zeros_like.default: _ZEROS,
    aten.new_zeros.default: _ZEROS,
    aten.ones_like.default: _ONES,
    aten.new_ones.default: _ONES,
    aten.full_like.default: _creation(aten.full.default, "fill_value"),
    aten.rand_like.default: _random(aten.rand.default),
    aten.randn_like.default: _random(aten.randn.default),
    aten.new_full.default: _creation(aten.full.default, "fill_value"),
    aten.empty.memory_format: _ZEROS,
    aten.empty_like.default: _ZEROS,
    aten.new_empty.default: _ZEROS,
    aten.empty_strided.default: _ZEROS,
    aten.new_empty_strided.default: _ZEROS,
    aten.empty_permuted.default: _ZEROS,
}


def simplify(b: Builder, call: Call, val: Any) -> fx.Node | Call:
    """The node that already holds the call's value, or the call in its plain spelling."""
    rule = _RULES.get(call[0])
    if rule is not None and (found := rule(b, call, val)) is not None:
        return found
    target, args, kwargs = call
    return (target, args, {k: v for k, v in kwargs.items() if not _is_default(target, k, v)})


def has_plain_spelling(target: Any) -> bool:
    """Whether :func:`simplify` knows the op."""
    return target in _RULES


_MEANS_NONE = {"pin_memory": False, "layout": torch.strided}


def _is_default(target: Any, keyword: str, value: Any) -> bool:
    if isinstance(value, fx.Node):
        return False
    default = _defaults(target).get(keyword, _MISSING)
    if default is None and value is not None and keyword in _MEANS_NONE:
        return value is _MEANS_NONE[keyword]
    return type(default) is type(value) and bool(default == value)


_MISSING = object()


@cache
def _defaults(target: Any) -> dict[str, Any]:
    arguments = target._schema.arguments
    return {a.name: a.default_value for a in arguments if a.has_default_value()}
