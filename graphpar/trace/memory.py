"""Tensors that share memory, as values: which view of what each name of the traced code is.

A :class:`Ref` stands for a tensor of the traced code. It is a base, or a view made from another
ref by a :class:`Step`. Writing to it gives its base a new value; the other views of that base
are made again when they are next read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpar.provenance import Source
from graphpar.trace.build import Builder, argument, aten, op_name
from graphpar.trace.where import trace_error


@dataclass(frozen=True, slots=True)
class Step:
    """A view op; the viewed tensor is the first argument. ``index``: which of its outputs."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Source
    index: int | None = None
    no_grad: bool = False


@dataclass(slots=True)
class Storage:
    """One piece of memory. ``make`` creates the node of its first value on demand.

    ``kind`` is "local", or the kind of what it belongs to outside the forward ("input",
    "parameter", "buffer", "constant"), and ``name`` that thing's name.
    """

    kind: str
    name: str
    node: fx.Node | None
    make: Callable[[], fx.Node] | None = None
    version: int = 0
    views: int = 0


@dataclass(slots=True, eq=False)
class Ref:
    storage: Storage
    parent: Ref | None = None
    step: Step | None = None
    node: fx.Node | None = None
    version: int = field(default=-1)


def base(node: fx.Node) -> Ref:
    """A tensor with memory of its own."""
    return Ref(Storage("local", "", node))


def view(parent: Ref, step: Step | None, node: fx.Node) -> Ref:
    """A view of ``parent`` whose present value is ``node``; no step: the same elements."""
    parent.storage.views += 1
    return Ref(parent.storage, parent, step, node, parent.storage.version)


def read(b: Builder, ref: Ref) -> fx.Node:
    """The node that holds the present value of ``ref``."""
    storage = ref.storage
    if ref.parent is None:
        if storage.node is None:
            assert storage.make is not None
            storage.node = storage.make()
        return storage.node
    if ref.node is None or ref.version != storage.version:
        ref.node = _replay(b, ref.step, read(b, ref.parent))
        ref.version = storage.version
    return ref.node


def _replay(b: Builder, step: Step | None, node: fx.Node) -> fx.Node:
    if step is None:
        return node
    outer, b.source = b.source, step.source
    if step.no_grad:
        node = b.detach(node)
    node = b.emit(step.target, (node, *step.args), step.kwargs)
    if step.index is not None:
        node = b.item(node, step.index)
    b.source = outer
    return node


def write(b: Builder, ref: Ref, node: fx.Node) -> None:
    """Give ``ref`` the value ``node``; its base and, later, its siblings follow."""
    storage = ref.storage
    if ref.parent is not None:
        step = ref.step
        if step is not None and step.no_grad and b.grad(read(b, ref.parent)):
            raise trace_error(
                "a view that was made without gradients of a tensor that has them is written to",
                b.source,
            )
        new = node if step is None else _put_back(b, step, read(b, ref.parent), node)
        write(b, ref.parent, new)
    else:
        storage.node = node
        storage.version += 1
    ref.node, ref.version = node, storage.version


_BIJECTIONS = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "alias", "view_as",
    "reshape_as", "contiguous", "expand", "expand_as", "atleast_1d", "atleast_2d", "atleast_3d",
    "ravel", "to",
}  # fmt: skip
_OWN_INVERSES = {"transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"}
_SCATTERS = {
    "select": aten.select_scatter.default,
    "slice": aten.slice_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
}


def _put_back(b: Builder, step: Step, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``whole`` with the elements that ``step`` views replaced by ``part``."""
    name = op_name(step.target)
    old, new = b.facts[whole].val, b.facts[part].val
    if name == "view" and old.dtype != new.dtype:
        return b.emit(aten.view.dtype, (part, old.dtype))
    if name in _BIJECTIONS and old.numel() == new.numel():
        return b.emit(aten.reshape.default, (part, list(old.shape)))
    if name in _OWN_INVERSES:
        return b.emit(step.target, (part, *step.args))
    if name == "permute":
        order = [d % old.dim() for d in step.args[0]]
        return b.emit(aten.permute.default, (part, [order.index(d) for d in range(old.dim())]))
    if name in _SCATTERS:
        return b.emit(_SCATTERS[name], (whole, part, *step.args), step.kwargs)
    if name == "view_as_real":
        return b.emit(aten.view_as_complex.default, (part,))
    if name == "view_as_complex":
        return b.emit(aten.view_as_real.default, (part,))
    return _put_by_position(b, step, whole, part)


def _put_by_position(b: Builder, step: Step, whole: fx.Node, part: fx.Node) -> fx.Node:
    """The same for any view: see which elements it shows, and replace those."""
    shape = list(b.facts[whole].val.shape)
    positions = torch.arange(math.prod(shape)).reshape(shape)
    try:
        shown = step.target(positions, *step.args, **step.kwargs)
        shown = shown if step.index is None else shown[step.index]
    except Exception:
        shown = positions.clone()
    if shown.untyped_storage().data_ptr() != positions.untyped_storage().data_ptr():
        raise trace_error(
            f"{step.target}: a tensor is written to through this view, which graphpar does not "
            "support; write to the tensor itself",
            b.source,
        )
    if shown.numel() == 0:
        return whole
    if step.index is not None:  # split, chunk, unbind, ...
        call = (step.target, (whole, *step.args), step.kwargs)
        dim = int(argument(call, "dim", 0)) % len(shape)
        start = int(shown.min()) // math.prod(shape[dim + 1 :]) % shape[dim]
        if shown.dim() < len(shape):
            return b.emit(aten.select_scatter.default, (whole, part, dim, start))
        stop = start + shown.shape[dim]
        return b.emit(aten.slice_scatter.default, (whole, part, dim, start, stop))
    if shown.unique().numel() != shown.numel():
        raise trace_error(f"{step.target}: overlapping elements are written to", b.source)
    flat = b.emit(aten.reshape.default, (whole, [-1]))
    index = b.constant(shown.flatten())
    values = b.emit(aten.reshape.default, (part, [-1]))
    put = b.emit(aten.index_put.default, (flat, [index], values))
    return b.emit(aten.reshape.default, (put, shape))
