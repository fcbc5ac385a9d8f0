"""runtime: a local program as a Python function."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.joined import join_slices
from graphpar.local import local, local_all
from graphpar.printer import format_python
from graphpar.program import Program


def compile_program(program: Program, group: str = "tp", rank: int = 0) -> Callable[..., list[Any]]:
    """The function ``forward(self, *tensors)`` of a local program.

    ``group`` is the name of the process group that the mesh dimension stands for, ``rank`` this
    process's in it. The source is
    registered with :mod:`linecache` under a hash of its text, so that debuggers and tracebacks
    show it.
    """
    text = format_python(join_slices(program), rank=rank)
    path = f"<graphpar {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict[str, Any] = {
        "tp": group,
        "local": local,
        "local_all": local_all,
        "module_at": module_at,
        "state_at": state_at,
        **program.constants,
    }
    exec(compile(text, path, "exec"), space)
    forward: Callable[..., list[Any]] = space["forward"]
    return forward


def module_at(root: nn.Module, *path: str) -> nn.Module:
    """The submodule at a path of names. Of a wrapper that hands on attributes (of a compiled
    module, say), what it hands on."""
    for name in path:
        found = root._modules.get(name)
        root = getattr(root, name) if found is None else found
    return root


def state_at(root: nn.Module, *path: str) -> Tensor:
    """The parameter or buffer at a path of names, as it is now; what a parametrization or another
    property gives in its place."""
    for name in path[:-1]:
        found = root._modules.get(name)
        root = getattr(root, name) if found is None else found
    value = root._parameters.get(path[-1])
    return getattr(root, path[-1]) if value is None else value


def select(leaves: Sequence[Any], program: Program) -> list[Any]:
    """The program's inputs among the flattened arguments of a call."""
    return [leaves[i] for i in program.placeholders]


def write_buffers(root: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Store the new values of mutated buffers."""
    for name, value in values.items():
        with torch.no_grad():
            root.get_buffer(name).copy_(value)
