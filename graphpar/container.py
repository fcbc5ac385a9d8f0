"""container: the module tree that holds a program's state under the original's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from graphpar.errors import GraphparWarning


class Container(nn.Module):
    """A module of the original's tree.

    Where the program runs a block, ``forward`` runs that block on this module's state; hooks of
    others are never called, and plain attributes were read while the original was traced: who sets
    them is warned.
    """

    def __init__(self, original: nn.Module | None = None) -> None:
        super().__init__()
        self._original = "" if original is None else type(original).__name__
        self._called = False
        plain = () if original is None else vars(original)
        self._plain = {name for name in plain if not name.startswith("_")} - {"training"}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_plain", ()):
            _warn(
                f"{name} of {self._original} was read while the model was traced, and setting it "
                "here changes nothing: set it on the original, and transform that again"
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: int | str) -> nn.Module:
        return self._modules[str(index)]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return iter(self._modules.values())

    def _get_name(self) -> str:
        return self._original or type(self).__name__

    def forward(self, block: Callable[..., Any], *values: Tensor) -> Any:
        return block(self, *values)

    # --- hooks ---

    def _hooked(self) -> None:
        if not self._called:
            _warn(
                f"hooks of this {self._original} are not called: its ops are among those of a "
                "module around it. Hooks that the original has when it is transformed are part of "
                "the program; the module that transform returns calls hooks as any does"
            )

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._hooked()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._hooked()
        return super().register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._hooked()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._hooked()
        return super().register_full_backward_hook(*args, **kwargs)


def _warn(message: str) -> None:
    warnings.warn(message, GraphparWarning, stacklevel=3)


def mirror(model: nn.Module) -> Container:
    """A tree of containers with the shape of ``model``; shared modules stay shared."""
    memo: dict[int, Container] = {}

    def copy(module: nn.Module) -> Container:
        if id(module) not in memo:
            memo[id(module)] = Container(module)
            memo[id(module)].training = module.training
            for name, child in module._modules.items():
                if child is not None:
                    memo[id(module)].add_module(name, copy(child))
        return memo[id(module)]

    return copy(model)


def place(root: nn.Module, name: str, value: Tensor, *, persistent: bool = True) -> None:
    """Register a parameter or buffer at a dotted name; parents that lack are made."""
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, Container())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module.register_parameter(last, value)
    else:
        module.register_buffer(last, value, persistent=persistent)
