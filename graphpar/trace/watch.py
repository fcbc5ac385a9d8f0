"""What a forward does that export would drop without a word.

A custom backward or a gradient hook would be lost, and gradients with it: an error. Activation
checkpointing is lost too, but changes no number: a warning.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.export import _trace
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint

from graphpar.provenance import Source
from graphpar.trace.where import trace_error, user_line

_SHAPES_LOG = logging.getLogger("torch.fx.experimental.symbolic_shapes")


def _here() -> Source | None:
    return user_line(traceback.extract_stack())


@contextmanager
def watched(model: nn.Module, notice: Callable[[str], None]) -> Iterator[None]:
    """Within, a forward of ``model`` that does so raises TraceError, or calls ``notice``.

    Gradient modes and autocast stay single nodes of the exported graph, without subgraphs.
    """
    modules = {id(module) for module in model.modules()}
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    without_reentrant = checkpoint._checkpoint_without_reentrant_generator
    set_attribute = nn.Module.__setattr__

    def say(text: str) -> None:
        at = _here()
        notice(f"{text}\n  at {at}" if at else text)

    def checkpointed() -> None:
        say("the model's own activation checkpointing is dropped; what to recompute is up to you")

    def generator(*args: Any, **kwargs: Any) -> Any:
        checkpointed()
        return without_reentrant(*args, **kwargs)

    def function(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:  # arguments: function, preserve_rng_state, inputs
            checkpointed()
            return args[0](*args[2:])
        if not cls.__module__.startswith("torch._"):
            what = (
                "a backward hook of a module"
                if cls is BackwardHookFunction
                else f"the backward of {cls.__name__}, a torch.autograd.Function,"
            )
            raise trace_error(
                f"{what} would be lost; use differentiable ops, or a torch.library.custom_op with "
                "register_autograd",
                _here(),
            )
        return apply(cls, *args, **kwargs)

    def hook(*args: Any, **kwargs: Any) -> None:
        raise trace_error(
            "a gradient hook on a tensor inside the forward would be lost; hook parameters instead",
            _here(),
        )

    def attribute(module: nn.Module, name: str, value: Any) -> None:
        old = module.__dict__.get(name)
        plain = isinstance(value, (bool, int, float, str)) and type(value) is type(old)
        if id(module) in modules and plain and value != old and name != "training":
            say(f"the forward changes the attribute {name}: the present value {old!r} is built in")
        set_attribute(module, name, value)

    def keep(graph: Any, signature: Any) -> Any:
        return graph, signature

    patches: tuple[tuple[Any, str, Any], ...] = (
        (checkpoint, "_checkpoint_without_reentrant_generator", generator),
        (torch.autograd.Function, "apply", classmethod(function)),
        (torch.Tensor, "register_hook", hook),
        (nn.Module, "__setattr__", attribute),
        (_trace, "print", lambda *args, **kwargs: None),  # prints the graph of a failed trace
        # As of torch 2.13 these passes lose a no_grad inside an autocast, and the like.
        (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", keep),
        (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", keep),
    )
    level = _SHAPES_LOG.level
    _SHAPES_LOG.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            for owner, name, value in patches:
                create = name == "print"
                stack.enter_context(mock.patch.object(owner, name, value, create=create))
            yield
    finally:
        _SHAPES_LOG.setLevel(level)
