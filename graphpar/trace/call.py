"""Calls: how arguments bind to a signature, what leaves they hold, when two calls trace alike."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from graphpar.errors import InputError

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_of(model: nn.Module | Callable[..., Any] | inspect.Signature) -> inspect.Signature:
    """The signature of a module's forward (or of a function)."""
    if isinstance(model, inspect.Signature):
        return model
    return inspect.signature(model.forward if isinstance(model, nn.Module) else model)


def bind(
    model: nn.Module | Callable[..., Any] | inspect.Signature,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One canonical form of a call: arguments by keyword, in the signature's order, where legal.

    Only arguments that have no name (positional-only ones, ``*args`` and what stands before
    them) stay positional. Defaults are not filled in.

    Raises:
        InputError: an unknown, missing or doubled argument; the message lists the known ones.
    """
    signature = signature_of(model)
    kwargs = dict(kwargs or {})
    parameters = signature.parameters
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        known = ", ".join(str(p) for p in parameters.values()) or "none"
        raise InputError(f"{error}; the model's arguments are: {known}") from error
    by_position: list[Any] = []
    by_keyword: dict[str, Any] = {}
    extra = any(
        p.kind is inspect.Parameter.VAR_POSITIONAL and bound.arguments.get(name)
        for name, p in parameters.items()
    )
    for name, parameter in parameters.items():
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            by_position.extend(value)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            by_keyword.update(sorted(value.items()))
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
            extra and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            by_position.append(value)
        else:
            by_keyword[name] = value
    return tuple(by_position), by_keyword


def register_dataclasses(value: Any) -> None:
    """Make dataclasses inside ``value`` known to pytree, so that they keep their class."""
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            register_dataclasses(leaf)


def flatten(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[list[Any], TreeSpec]:
    """The leaves of a call's arguments, and their structure."""
    tree = (tuple(args), dict(kwargs or {}))
    register_dataclasses(tree)
    return pytree.tree_flatten(tree)


def call_key(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, sizes: bool = True
) -> Hashable:
    """Equal for two calls that trace to the same program: a key for a cache of traces.

    It holds the structure, each tensor's shape, dtype, device and whether it wants a gradient,
    each other leaf's type and value, and the ambient autocast state. Leaves that cannot be hashed
    count by identity. Without ``sizes`` a tensor's number of dimensions stands for its shape.
    """
    leaves, spec = flatten(args, kwargs)
    return (_structure(spec), tuple(_leaf_key(leaf, sizes) for leaf in leaves), autocast_state())


def _structure(spec: TreeSpec) -> Hashable:
    """The structure in tuples: torch.compile cannot look up a ``TreeSpec`` in a dict."""
    return spec.type, _in_tuples(spec.context), tuple(_structure(c) for c in spec.children())


def _in_tuples(context: Any) -> Hashable:
    if isinstance(context, (list, tuple)):
        return tuple(_in_tuples(value) for value in context)
    return context  # type: ignore[no-any-return]


_PLAIN = bool, int, float, str, NoneType
"""Those whose ``hash`` torch 2.11 cannot compile."""


def _leaf_key(leaf: Any, sizes: bool) -> Hashable:
    if isinstance(leaf, Tensor):
        shape = tuple(map(int, leaf.shape)) if sizes else leaf.dim()
        return (shape, leaf.dtype, leaf.device, leaf.requires_grad)
    if not isinstance(leaf, _PLAIN):
        try:
            hash(leaf)
        except TypeError:
            return (type(leaf), id(leaf))
    return (type(leaf), leaf)


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The enabled autocast contexts around the caller: device type and dtype of each."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )


def example_inputs(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The inputs a model declares in a ``dummy_inputs`` attribute, bound; ``None`` without."""
    declared = getattr(model, "dummy_inputs", None)
    if declared is None:
        return None
    if isinstance(declared, Mapping):
        return bind(model, (), {str(name): value for name, value in declared.items()})
    return bind(model, declared if isinstance(declared, (tuple, list)) else (declared,))


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The structure ``spec`` filled with ``leaves``."""
    return pytree.tree_unflatten(list(leaves), spec)
