"""runtime: a local program as a Python function, and the module tree that holds its state."""

from __future__ import annotations

import gc
import hashlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.local import local, local_all
from graphpar.printer import format_python
from graphpar.program import Program


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, Python looks for no cycles: tracing makes many objects, nearly all of which stay, and
    the collector would walk them again and again (a third of the time)."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Container(nn.Module):
    """A module of the original's tree: it holds state under the original names.

    Where the program runs a block, ``forward`` runs that block on this module's state.
    """

    def __init__(self, original: str = "") -> None:
        super().__init__()
        self._original = original
        self._block: Callable[..., Any] | None = None

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


def mirror(model: nn.Module) -> Container:
    """A tree of containers with the shape of ``model``; shared modules stay shared."""
    memo: dict[int, Container] = {}

    def copy(module: nn.Module) -> Container:
        if id(module) not in memo:
            memo[id(module)] = Container(type(module).__name__)
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


def compile_program(program: Program, group: str = "tp", rank: int = 0) -> Callable[..., list[Any]]:
    """The function ``forward(self, *tensors)`` of a local program.

    ``group`` is the name of the process group that the mesh dimension stands for, ``rank`` this
    process's in it. The source is
    registered with :mod:`linecache` under a hash of its text, so that debuggers and tracebacks
    show it.
    """
    text = format_python(program, rank=rank)
    path = f"<graphpar {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict[str, Any] = {
        "tp": group,
        "local": local,
        "local_all": local_all,
        **program.constants,
    }
    exec(compile(text, path, "exec"), space)
    forward: Callable[..., list[Any]] = space["forward"]
    return forward


def select(leaves: Sequence[Any], program: Program) -> list[Any]:
    """The program's inputs among the flattened arguments of a call."""
    return [leaves[i] for i in program.placeholders]


def write_buffers(root: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Store the new values of mutated buffers."""
    for name, value in values.items():
        with torch.no_grad():
            root.get_buffer(name).copy_(value)
