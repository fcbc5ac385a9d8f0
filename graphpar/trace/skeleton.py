"""A copy of a module without its parameters' memory, to trace again later."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.errors import TraceError

_CONTAINERS = (dict, OrderedDict, set, list)
_ATOMS = frozenset({bool, int, float, str, type(None)})


def skeleton(model: nn.Module) -> nn.Module:
    """A deep copy of ``model`` whose parameters hold no memory, which can still be traced.

    Parameters keep shape, dtype, device, ``requires_grad`` and ties; buffers and other tensors
    without gradients are copied whole. Its forward can be traced, not run.

    Raises:
        TraceError: something in the module cannot be deep-copied.
    """
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        for value in vars(module).values():
            # A module has a dozen containers for hooks: making empty ones is most of the time else.
            if type(value) in _CONTAINERS and not value:
                memo[id(value)] = type(value)()
                continue
            for tensor in () if type(value) in _ATOMS else _tensors(value):
                if id(tensor) not in memo:
                    hollow = isinstance(tensor, nn.Parameter) or tensor.requires_grad
                    memo[id(tensor)] = _hollow(tensor) if hollow else _copy(tensor)
    try:
        _copy_modules(modules, memo)
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TraceError(
            f"the model's structure cannot be copied, to trace it again for other shapes: {error}"
        ) from error


def _copy_modules(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of modules that are copied as objects are by default into ``memo``: so
    ``deepcopy`` makes them, which also copies every attribute's name."""
    states: dict[int, Any] = {}
    for module in modules:
        kind = type(module)
        if hasattr(kind, "__deepcopy__") or kind in copyreg.dispatch_table:
            continue
        reduced: Any = module.__reduce_ex__(4)
        make, arguments, state, *rest = reduced if isinstance(reduced, tuple) else (None,) * 3
        plain = make is copyreg.__newobj__ and arguments == (kind,)  # type: ignore[attr-defined]
        if plain and type(state) is dict and not any(rest):
            memo[id(module)], states[id(module)] = kind.__new__(kind), state
    for each, state in reversed(states.items()):  # children before those that hold them
        memo[each].__setstate__(
            {
                name: value if type(value) in _ATOMS else copy.deepcopy(value, memo)
                for name, value in state.items()
            }
        )


def on_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def wholly_on_meta(module: nn.Module, recurse: bool = True) -> bool:
    """Whether all parameters and buffers are on the meta device."""
    held = (*module.parameters(recurse), *module.buffers(recurse))
    return all(value.is_meta for value in held)


def all_on_meta(model: nn.Module) -> nn.Module:
    """A skeleton of which everything is on the meta device."""
    made = skeleton(model)
    if not wholly_on_meta(made):
        for module in made.modules():
            if not wholly_on_meta(module, recurse=False):
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
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in _ATOMS:
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
