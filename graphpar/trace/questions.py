"""What a model asks of tensors that were handed out in place of an op's results."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from graphpar.trace.events import Unrecordable, place, state
from graphpar.trace.layer import Layer


class Unlike(Exception):
    """The model asks of a tensor what only the op that makes it could tell."""


_LOOKS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")
} | {Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_contiguous}
_MORE_THAN_LOOKS = {
    getattr(Tensor, name).__get__ for name in ("_base", "_version", "data", "grad_fn", "is_leaf")
} | {
    getattr(Tensor, "data").__set__,  # noqa: B009 - its type is that of the attribute
    getattr(Tensor, "requires_grad").__set__,  # noqa: B009
    Tensor._is_view,
    Tensor.data_ptr,
    Tensor.requires_grad_,
    Tensor.retain_grad,
    Tensor.set_,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.is_set_to,
}
"""Questions that only the op that made a tensor could answer, and changes that are no op."""

_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor")


def _follows_from_arguments(func: Any) -> bool:
    """Whether which ops a torch function calls follows from its arguments."""
    return isinstance(func, _BUILTIN) or getattr(func, "__module__", None) in _PYTHON


class Questions:
    """``handed``: the tensors that stand for results; ``asked``: what was asked of one."""

    def __init__(self) -> None:
        self.handed = WeakTensorKeyDictionary()
        self.asked: str | None = None

    def check(self, func: Any, args: Any, layer: Layer | None = None) -> None:
        """Refuse what a handed tensor cannot answer; and of a value of ``layer`` too, for the
        layers after it are handed one in its place.

        Raises:
            Unlike: it is asked so.
        """
        if func not in _MORE_THAN_LOOKS:
            return
        with torch._C.DisableTorchFunction():
            values = [x for x in args if isinstance(x, Tensor)]
            inner = layer is not None and any(layer.number(x) is not None for x in values)
            if inner or any(x in self.handed for x in values):
                self.asked = _name(func)  # also if the model goes on after the error
                raise Unlike(self.asked)


class Elsewhere(TorchFunctionMode):
    """Sees what is asked outside of layers."""

    def __init__(self, questions: Questions) -> None:
        self.questions = questions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.questions.check(func, args)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Sees the torch functions that a layer calls, and what it asks."""

    def __init__(self, questions: Questions, layer: Layer) -> None:
        self.questions = questions
        self.layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        layer = self.layer
        self.questions.check(func, args, layer)
        if layer.busy or not (layer.following or layer.recording):
            return func(*args, **kwargs)
        if not _follows_from_arguments(func):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            reader = layer.reader()
            try:
                key = (reader.call(func, args, kwargs), reader.alike(), state(), place())
            except Unrecordable:
                key = None
            if layer.following and (known := layer.at.calls.get(key)) is not None:
                return layer.take(known, reader.operands)
        at, count = layer.at, len(layer.path)
        out = func(*args, **kwargs)
        # Not if the first of its ops were followed, and only the later ones are in the path.
        whole = len(layer.path) > count and layer.path[count][0] in at.next.values()
        if key is not None and layer.recording and whole:
            with torch._C.DisableTorchFunction():
                made = layer.shortcut(count, reader.operands, out)
            if made is not None:
                at.calls[key] = made
        return out


def _name(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    return f"Tensor.{getattr(owner, '__name__', None) or func.__name__}"
