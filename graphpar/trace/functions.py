"""A ``torch.autograd.Function`` as an op, so that a trace keeps its backward.

The op runs the function's own ``apply``. It is pointwise, and so can run on shards, if all that its
forward and its backward do is pointwise; else it is opaque.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_pre_dispatch_torch_function_mode,
    make_fx,
)
from torch.utils._python_dispatch import _disable_current_modes

from graphpar.passes.rules.pointwise import is_pointwise
from graphpar.trace.fold import draws
from graphpar.trace.functionalize import written

NAMESPACE = "graphpar_functions"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
Apply = Callable[..., Any]


class FunctionRefused(Exception):
    """Why a function cannot be an op."""


@dataclass(frozen=True, slots=True)
class _Op:
    op: torch._ops.OpOverload
    places: tuple[int, ...]
    """Which results are tensors; the others are ``None``."""
    count: int
    """The number of results; 0: one, not in a tuple."""


_OPS: dict[Hashable, tuple[_Op, Any]] = {}


class _Hook:
    _handlers: ClassVar[list[Apply]] = []

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        # This code runs as Function.apply: with its globals, and closing over a __class__.
        from graphpar.trace.functions import _Hook

        __class__  # type: ignore[name-defined]  # noqa: B018
        return _Hook._handlers[-1](cls, *args, **kwargs)


@contextmanager
def apply_replaced(replacement: Callable[[Apply], Apply]) -> Iterator[None]:
    """Within, ``Function.apply`` is ``replacement(original)``.

    Its code is exchanged, so that references to it that were taken before are replaced too.
    """
    apply: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    original = FunctionType(apply.__code__, apply.__globals__, closure=apply.__closure__)
    _Hook._handlers.append(replacement(original))
    before = apply.__code__
    apply.__code__ = _Hook.apply.__func__.__code__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        apply.__code__ = before
        _Hook._handlers.pop()


def call_as_op(cls: type, apply: Apply, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``cls.apply(*args, **kwargs)`` through an op; ``apply`` is the original ``Function.apply``.

    Raises:
        FunctionRefused: it writes to its arguments, draws random numbers, or cannot be seen.
    """
    if kwargs:
        args = _by_position(cls, args, kwargs)
    tensors = [x for x in args if isinstance(x, Tensor)]
    others = tuple(None if isinstance(x, Tensor) else (type(x), _key(x)) for x in args)
    alike = len({tuple(_hints(x.shape)) for x in tensors}) == 1
    key = (cls, others, alike, tuple((x.dtype, x.dim(), x.requires_grad) for x in tensors))
    if key not in _OPS:
        _OPS[key] = _make(cls, apply, args), args  # the arguments live on: ids are keys
    made = _OPS[key][0]
    found = made.op(*tensors)
    if not made.count:
        return found
    results: list[Tensor | None] = [None] * made.count
    for place, value in zip(made.places, found if len(made.places) > 1 else [found], strict=True):
        results[place] = value
    return tuple(results)


def _by_position(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    apart = cls.setup_context is not torch.autograd.Function.setup_context
    forward = cls.forward if apart else partial(cls.forward, None)  # None for ctx
    bound = inspect.signature(forward).bind(*args, **kwargs)
    if bound.kwargs:
        raise FunctionRefused("it takes arguments by keyword only")
    return bound.args


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value  # type: ignore[no-any-return]


def _fill(args: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    rest = iter(tensors)
    return [next(rest) if isinstance(x, Tensor) else x for x in args]


def _make(cls: type, apply: Apply, args: Sequence[Any]) -> _Op:
    graph, tensors, results, single = _look(cls, apply, args)
    places = tuple(i for i, r in enumerate(results) if isinstance(r, Tensor))
    if not places:
        raise FunctionRefused("it returns no tensor")
    shapes = {x.shape for x in [*tensors, *(r for r in results if isinstance(r, Tensor))]}
    pointwise = len(shapes) == 1 and _is_pointwise(graph, *shapes)
    # A number that it computes from a size would be another one on a shard.
    if pointwise and _text(graph) == _text_of_larger(cls, apply, args):
        tags: tuple[torch.Tag, ...] = (torch.Tag.pointwise,)
    else:
        tags = ()
    name = f"{re.sub(r'[^A-Za-z0-9]+', '_', cls.__qualname__).strip('_')}_{len(_OPS)}"
    inputs = ", ".join(f"Tensor x{i}" for i in range(len(tensors)))
    outputs = ", ".join(["Tensor"] * len(places))
    _LIBRARY.define(
        f"{name}({inputs}) -> {outputs if len(places) == 1 else f'({outputs})'}", tags=tags
    )

    def run(*given: Tensor) -> Any:
        found = apply(cls, *_fill(args, given))
        kept = [found] if single else [found[i] for i in places]
        return kept[0] if len(kept) == 1 else tuple(kept)

    _LIBRARY.impl(name, run, "CompositeImplicitAutograd")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _Op(op, places, 0 if single else len(results))


def _look(
    cls: type, apply: Apply, args: Sequence[Any], times: int = 1
) -> tuple[fx.Graph, list[Tensor], list[Any], bool]:
    """The ops of forward and backward on fake tensors; what went in and came out."""
    # Without the mode that puts grad mode's changes into the graph of the export.
    no_export = _temp_remove_pre_dispatch_torch_function_mode()
    with no_export, _disable_current_modes(), FakeTensorMode(), torch.enable_grad():
        tensors = [_like(x, times) for x in args if isinstance(x, Tensor)]
        try:
            found = apply(cls, *_fill(args, tensors))
            results = list(found) if isinstance(found, tuple) else [found]
            made = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
            weights = [torch.empty_like(r) for r in made]

            def joint(tensors: list[Tensor], weights: list[Tensor]) -> Any:
                values = apply(cls, *_fill(args, tensors))
                values = values if isinstance(values, tuple) else (values,)
                wanted = [x for x in tensors if x.requires_grad]
                outs = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
                gradients = (
                    torch.autograd.grad(outs, wanted, weights, allow_unused=True) if outs else ()
                )
                return values, gradients

            graph = make_fx(joint)(tensors, weights).graph
        except Exception as error:
            raise FunctionRefused(f"it cannot be run on fake tensors: {error}") from error
    for node in graph.nodes:
        names = [node.args[i] for i in written(node.target)] if node.op == "call_function" else []
        if any(isinstance(n, fx.Node) and n.op == "placeholder" for n in names):
            raise FunctionRefused("it writes to its arguments")
        if node.op == "call_function" and draws(node):
            raise FunctionRefused("it draws random numbers")
    return graph, tensors, results, not isinstance(found, tuple)


def _like(x: Tensor, times: int = 1) -> Tensor:
    """A fake tensor like ``x``, or a contiguous one with each dimension ``times`` as long."""
    sizes = [size * times for size in _hints(x.shape)]
    strides = _hints(x.stride()) if times == 1 else torch.empty(sizes, device="meta").stride()
    made = torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad).clone()  # no leaf: it could be written to


def _hints(sizes: Sequence[Any]) -> list[int]:
    """The numbers that symbolic sizes stand for at present."""
    return [s if isinstance(s, int) else s.node.hint for s in sizes]


def _text(graph: fx.Graph) -> str:
    """The ops and their arguments, numbers included."""
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def _text_of_larger(cls: type, apply: Apply, args: Sequence[Any]) -> str | None:
    try:
        return _text(_look(cls, apply, args, times=2)[0])
    except FunctionRefused:
        return None


_PASSING = {"detach", "alias", "clone", "ones_like", "zeros_like", "empty_like", "full_like"}


def _is_pointwise(graph: fx.Graph, shape: torch.Size) -> bool:
    """Whether every op is, on tensors of this one shape and numbers."""
    for node in graph.nodes:
        if node.op == "get_attr":
            return False
        if node.op == "call_function":
            value = node.meta.get("val")
            name = node.target._schema.name.split("::")[-1].strip("_")
            if not isinstance(value, Tensor) or value.shape not in (shape, ()):
                return False
            if not is_pointwise(node.target) and name not in _PASSING:
                return False
    return True
