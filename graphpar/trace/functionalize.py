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


@cache
def functional(target: OpOverload) -> OpOverload | None:
    """The overload without side effects: ``add.Tensor`` of ``add_.Tensor``; ``None`` if none.

    An ``out=`` overload's functional one takes the same arguments without the outputs.
    """
    schema = target._schema
    outputs = {a.name for a in schema.arguments if a.is_out}
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in outputs]
    namespace, name = schema.name.split("::")
    names = [name] if outputs else _functional_names(name)
    for candidate in names:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        overloads = [] if packet is None else packet.overloads()
        for overload in sorted(overloads, key=lambda o: o != schema.overload_name):
            found: OpOverload = getattr(packet, overload)
            takes = found._schema.arguments
            fits = [(a.name, str(a.type)) for a in takes[: len(wanted)]] == wanted
            optional = all(a.has_default_value() for a in takes[len(wanted) :])
            if fits and optional and not found._schema.is_mutable:
                return found
    return None


def _functional_names(name: str) -> list[str]:
    if name.startswith("__i"):  # __iand__ → __and__
        return ["__" + name[3:], name[3:-2]]
    return [name.removesuffix("_"), name.removesuffix("_") + "_functional"]


def value_written(b: Builder, call: Call) -> list[fx.Node]:
    """The values that an in-place call gives to the tensors it writes to."""
    target, args, kwargs = call
    name = op_name(target)
    if name in ("copy", "fill", "zero") and target._schema.name.endswith("_"):
        return [_overwrite(b, call, name)]
    found = functional(target)
    if found is None:
        raise trace_error(f"{target} has no form without side effects", b.source)
    outputs = [a.name for a in target._schema.arguments if a.is_out]
    node = b.emit(found, args, {k: v for k, v in kwargs.items() if k not in outputs})
    val = b.facts[node].val
    if isinstance(val, (tuple, list)):
        return [b.item(node, i) for i in range(len(val))]
    return [node]


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
    target, args, kwargs = call
    whole: fx.Node = args[0]
    if b.grad(whole):  # the tensor's old value gets a gradient of zeros, as in the original
        plain = {"copy": aten.copy.default, "zero": aten.zero.default}.get(name)
        return b.emit(plain or functional(target), args, kwargs)
    if name == "copy":
        return fit(b, argument(call, "src"), whole)
    value = 0 if name == "zero" else argument(call, "value")
    if isinstance(value, fx.Node):
        return fit(b, value, whole)
    val = b.facts[whole].val
    placed = {"dtype": val.dtype, "device": val.device}
    return b.emit(aten.full.default, (list(val.shape), value), placed)
