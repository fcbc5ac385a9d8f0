"""In-place ops as the functional ops that compute the same value."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from graphpar.trace.build import Builder, Call, argument, aten, op_name
from graphpar.trace.where import trace_error


@cache
def written(target: Any) -> tuple[int, ...]:
    """The positions in the schema of the arguments that ``target`` writes to."""
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return ()
    return tuple(
        i
        for i, a in enumerate(target._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


@cache
def changes_view(target: Any) -> bool:
    """Whether ``target`` changes only the shape of its tensor: ``squeeze_``, ``t_``, ..."""
    return isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags


_SHAPES_IN_PLACE = {"squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided"}


def view_of(target: OpOverload) -> OpOverload | None:
    """The view op of one that changes a tensor's shape: ``squeeze.dim`` of ``squeeze_.dim``."""
    return functional(target) if op_name(target) in _SHAPES_IN_PLACE else None


@cache
def functional(target: OpOverload) -> OpOverload | None:
    """The overload without side effects: ``add.Tensor`` of ``add_.Tensor``; ``None`` if none.

    An ``out=`` overload's functional one takes the same arguments without the outputs.
    """
    schema = target._schema
    wanted = _takes(target)
    namespace, name = schema.name.split("::")
    for candidate in _functional_names(name):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in [] if packet is None else packet.overloads():
            found: OpOverload = getattr(packet, overload)
            if _takes(found) == wanted and not found._schema.is_mutable:
                return found
    return None


def _takes(target: OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments, without outputs; the first one's name varies."""
    arguments = [a for a in target._schema.arguments if not a.is_out]
    return [("" if i == 0 else a.name, str(a.type)) for i, a in enumerate(arguments)]


def _functional_names(name: str) -> list[str]:
    if name.startswith("__i"):  # __iand__ → __and__
        return ["__" + name[3:], name[3:-2]]
    plain = name.removesuffix("_")
    return [plain, f"{plain}_functional"]


def value_written(b: Builder, call: Call) -> list[fx.Node]:
    """The values that an in-place call gives to the tensors it writes to."""
    target = call[0]
    name = op_name(target)
    if name in ("copy", "fill", "zero") and target._schema.name.endswith("_"):
        return [_overwrite(b, call, name)]
    found = functional(target)
    if found is None:
        raise trace_error(f"{target} has no form without side effects", b.source)
    args, kwargs = _arguments(found, call)
    if name in _RANDOM_FILLS:
        args = (b.detach(args[0]), *args[1:])  # only its shape is read
    node = b.emit(found, args, kwargs)
    val = b.facts[node].val
    if isinstance(val, (tuple, list)):
        return [b.item(node, i) for i in range(len(val))]
    return [node]


_RANDOM_FILLS = {
    "uniform", "normal", "bernoulli", "exponential", "random", "geometric", "cauchy", "log_normal",
}  # fmt: skip


def _arguments(found: OpOverload, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for ``found``: those that it requires may be optional in place."""
    target, args, kwargs = call
    mine = target._schema.arguments
    for wanted, given in list(zip(found._schema.arguments, mine, strict=False))[len(args) :]:
        if not wanted.has_default_value() and wanted.name not in kwargs:
            kwargs = {**kwargs, wanted.name: given.default_value}
    return args, {k: v for k, v in kwargs.items() if not any(a.is_out for a in mine if a.name == k)}


def fit(b: Builder, node: fx.Node, like: fx.Node) -> fx.Node:
    """``node`` in the dtype, device and shape of the tensor that it is written to."""
    val, wanted = b.facts[node].val, b.facts[like].val
    if val.dtype != wanted.dtype or val.device != wanted.device:
        if val.device != wanted.device:
            node = b.emit(aten.to.device, (node, wanted.device, wanted.dtype))
        else:
            node = b.emit(aten.to.dtype, (node, wanted.dtype))
    if val.shape != wanted.shape:
        node = b.emit(aten.expand.default, (node, list(wanted.shape)))
    return node


def _overwrite(b: Builder, call: Call, name: str) -> fx.Node:
    """``copy_``, ``fill_`` and ``zero_``, which do not read the tensor they write to."""
    whole: fx.Node = call[1][0]
    if name == "copy":
        return fit(b, argument(call, "src"), whole)
    value = 0 if name == "zero" else argument(call, "value")
    if isinstance(value, fx.Node):
        return fit(b, value, whole)
    val = b.facts[whole].val
    placed = {"dtype": val.dtype, "device": val.device}
    return b.emit(aten.full.default, (list(val.shape), value), placed)
