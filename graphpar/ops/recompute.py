"""Run a region of a program so that backward runs it again, up to what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

Run = Callable[..., Any]
"""Runs an op: ``run(op, *args, **kwargs)``."""


def recompute(
    region: Callable[..., Any],
    kept: Sequence[Tensor],
    passed: Sequence[Tensor] = (),
    *,
    random: bool = False,
) -> Any:
    """``region(run, *kept, *passed)``, of which autograd keeps ``kept`` alone.

    Backward calls the region again, without reentering autograd, and stops when it has what it
    needs (:func:`torch.utils.checkpoint.checkpoint`). It calls the ops whose results it does not
    need through ``run``: they tell autograd what they keep, and compute nothing. They may read
    ``passed``, which is not kept. ``random``: restore the state of the generators.
    """
    if torch.compiler.is_compiling():  # the compiler finds by itself what is not needed
        return checkpoint(
            partial(region, _call), *kept, *passed, use_reentrant=False, preserve_rng_state=random
        )
    held = list(passed)
    forms = [_form(x) for x in passed]
    calls = 0

    def run(*values: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return region(_call, *values, *held)
        return region(_pretend, *values, *(_without_values(form) for form in forms))

    result = checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=random)
    held.clear()
    return result


def _call(op: Run, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _pretend(op: Run, *args: Any, **kwargs: Any) -> Any:
    with _Pretend():  # type: ignore[no-untyped-call]
        return op(*args, **kwargs)


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad


def _without_values(form: tuple[Any, ...]) -> Tensor:
    shape, strides, dtype, requires_grad = form
    with _disable_current_modes():
        return torch.empty_strided(
            shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad
        )


class _Pretend(TorchDispatchMode):
    """Views of tensors with values are made; every other op gives tensors without values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with _disable_current_modes():
            if func.is_view and not any(map(_is_pretended, leaves)):
                return func(*args, **kwargs)
            args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
            return func(*args, **kwargs)


def _is_pretended(x: Tensor) -> bool:
    """Where memory is predicted, what has a value is a FakeTensor, on the meta device too."""
    return x.is_meta and not isinstance(x, FakeTensor)


def _to_meta(x: Tensor) -> Tensor:
    if _is_pretended(x):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
