"""A copy of a module without its parameters' memory, to trace again later."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.errors import TraceError

_PLAIN = (dict, OrderedDict, set, list)


def skeleton(model: nn.Module) -> nn.Module:
    """A deep copy of ``model`` whose parameters hold no memory, which can still be traced.

    Parameters keep shape, dtype, device, ``requires_grad`` and ties; buffers and other tensors
    without gradients are copied whole. Its forward can be traced, not run.

    Raises:
        TraceError: something in the module cannot be deep-copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        # A module has a dozen containers for hooks: making empty ones is most of the time else.
        memo |= {id(v): type(v)() for v in vars(module).values() if type(v) in _PLAIN and not v}
        for tensor in _tensors(vars(module)):
            if id(tensor) not in memo:
                hollow = isinstance(tensor, nn.Parameter) or tensor.requires_grad
                memo[id(tensor)] = _hollow(tensor) if hollow else _copy(tensor)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TraceError(
            f"the model's structure cannot be copied, to trace it again for other shapes: {error}"
        ) from error


def on_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def all_on_meta(model: nn.Module) -> nn.Module:
    """A skeleton of which everything is on the meta device."""
    made = skeleton(model)
    for module in made.modules():
        held = (*module._parameters.values(), *module._buffers.values())
        if not all(value is None or value.is_meta for value in held):
            module._apply(lambda value: value.to("meta"), recurse=False)
    return made


def hollow_on(model: nn.Module, device: torch.device) -> nn.Module:
    """The skeleton of what ``model``, itself one on the meta device, is on ``device``."""
    made = skeleton(model)
    for module in made.modules():
        tensors: list[dict[str, Any]] = [module._parameters, module._buffers]
        for held in tensors:
            for name, value in held.items():
                held[name] = None if value is None else _moved(value, device)
    return made


def _moved(value: Tensor, device: torch.device) -> Tensor:
    if not value.is_meta:
        return value.to(device)
    if not hasattr(value, "_graphpar_moved"):  # ties stay ties
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        empty.untyped_storage().resize_(0)
        if isinstance(value, nn.Parameter):
            empty = torch.Tensor._make_subclass(type(value), empty, value.requires_grad)
        value._graphpar_moved = empty  # type: ignore[attr-defined]
    moved: Tensor = value._graphpar_moved  # type: ignore[attr-defined]
    return moved


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's own attributes, and in containers there."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    vars(copied).update(vars(tensor))
    return copied


def _hollow(tensor: Tensor) -> Tensor:
    """The same tensor without memory; not a parameter if it is computed from some."""
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if empty.device.type != "meta":
        empty.untyped_storage().resize_(0)
    if isinstance(tensor, nn.Parameter):
        empty = torch.Tensor._make_subclass(type(tensor), empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty
