"""Autocast regions as explicit casts.

Which inputs of an op autocast casts, and to what, is seen by running the op on fake tensors with
and without autocast. The casts found are proven: the op on cast inputs, without autocast, must
run the same kernels at the same dtypes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.trace.build import Builder, Call, argument, aten
from graphpar.trace.where import trace_error

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_CASTS = (aten._to_copy.default, aten.to.dtype)
Kernel = tuple[Any, tuple[torch.dtype, ...], tuple[torch.dtype, ...]]
"""An op that ran, and the dtypes of its inputs and of its results."""


@dataclass(frozen=True, slots=True)
class Context:
    """One device type's autocast setting."""

    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """``casts[i]`` is what tensor argument i becomes; ``dtype`` is the op's own argument."""

    casts: tuple[torch.dtype | None, ...]
    dtype: torch.dtype | None = None


def _dtypes(tree: Any) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


class _Recorder(TorchDispatchMode):
    """Notes every kernel, and every cast of one of the given tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position = {id(t): i for i, t in enumerate(tensors)}
        self.kernels: list[Kernel] = []
        self.casts: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and id(args[0]) in self.position:
            self.casts.append((self.position[id(args[0])], result.dtype))
        elif _dtypes(result):  # not a query such as prim.device
            self.kernels.append((func, _dtypes((args, kwargs)), _dtypes(result)))
        return result


class Autocast:
    def __init__(self, builder: Builder, ambient: Sequence[tuple[str, torch.dtype]]) -> None:
        self.b = builder
        self.state = {device: Context(device, dtype, True) for device, dtype in ambient}
        self.ambient = bool(ambient)
        self.outer: list[dict[str, Context]] = []
        self.policies: dict[Any, Policy] = {}
        self.kept: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def enter(self, device: str, dtype: torch.dtype | None, enabled: bool) -> None:
        """A ``with torch.autocast(...)`` of the traced code begins."""
        self.outer.append(dict(self.state))
        dtype = dtype or torch.get_autocast_dtype(device)
        self.state[device] = Context(device, dtype, enabled)

    def exit(self) -> None:
        """The innermost one ends; with the outermost, autocast forgets the casts it kept."""
        self.state = self.outer.pop()
        if not self.outer and not self.ambient:
            self.kept = {}

    @property
    def enabled(self) -> bool:
        return any(context.enabled for context in self.state.values())

    def contexts(self, *, enabled: bool = True) -> list[torch.autocast]:
        """What surrounds the present op; or the same with autocast off."""
        return [
            torch.autocast(c.device, c.dtype, enabled=enabled and c.enabled, cache_enabled=False)
            for c in self.state.values()
        ]

    def cast(self, call: Call) -> Call:
        """The call with the casts that autocast would do."""
        if not self.enabled:
            return call
        leaves, spec = pytree.tree_flatten(call[1:])
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        if not at:
            return call
        fakes = [self.b.facts[leaves[i]].val for i in at]
        key = (call[0], _dtypes(fakes), argument(call, "dtype"), *self.state.values())
        if key not in self.policies:
            self.policies[key] = self.policy(call)
        policy = self.policies[key]
        for i, dtype in zip(at, policy.casts, strict=True):
            if dtype is not None:
                leaves[i] = self.cast_node(leaves[i], dtype)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if policy.dtype is not None:
            kwargs = {**kwargs, "dtype": policy.dtype}
        return (call[0], args, kwargs)

    def cast_node(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Autocast keeps its casts of leaves, so that their gradients add up at low precision."""
        leaf = node.op in ("get_attr", "placeholder") and self.b.grad(node)
        if not leaf or self.b.facts[node].val.dtype != torch.float32 or dtype == torch.float64:
            return self.b.emit(aten.to.dtype, (node, dtype))
        key = (node, dtype)
        if key not in self.kept:
            self.kept[key] = self.b.emit(aten.to.dtype, (node, dtype))
        return self.kept[key]

    def policy(self, call: Call) -> Policy:
        cast = self.observe(call, autocast=True)
        plain = self.observe(call)  # None: it cannot run on mixed dtypes
        none = Policy((None,) * len(cast.floating))
        own_casts = plain.casts if plain is not None else set()
        if plain is not None and plain.kernels == cast.kernels and cast.casts <= own_casts:
            return none
        seen = dict(cast.casts - own_casts)
        exact = Policy(tuple(seen.get(i) for i in range(len(cast.floating))))
        candidates = [exact]
        if argument(call, "dtype") is None:
            candidates.append(replace(exact, dtype=torch.float32))
        for candidate in candidates:
            if (found := self.observe(call, candidate)) and found.kernels == cast.kernels:
                return candidate
        # An op made of others, whose parts are cast: the casts move to its inputs.
        for dtype in (*(c.dtype for c in self.state.values() if c.enabled), torch.float32):
            moved = Policy(tuple(dtype if floats else None for floats in cast.floating))
            found = self.observe(call, moved)
            if found and _core(found.kernels) == _core(cast.kernels):
                return moved
        raise trace_error(
            f"{call[0]} under autocast is not supported; run it in "
            "torch.autocast(..., enabled=False) on inputs that you cast yourself",
            self.b.source,
        )

    @overload
    def observe(self, call: Call, *, autocast: Literal[True]) -> Observation: ...
    @overload
    def observe(self, call: Call, policy: Policy | None = None) -> Observation | None: ...
    def observe(
        self, call: Call, policy: Policy | None = None, autocast: bool = False
    ) -> Observation | None:
        """Run the op on fake tensors and note what it did; ``None`` if it refuses its inputs."""
        args, kwargs = self.b.val(call[1:])
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.b.fake())
            casts = policy.casts if policy else (None,) * len(at)
            for i, dtype in zip(at, casts, strict=True):
                leaves[i] = leaves[i].view_as(leaves[i]) if dtype is None else leaves[i].to(dtype)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            if policy and policy.dtype is not None:
                kwargs = {**kwargs, "dtype": policy.dtype}
            recorder = stack.enter_context(_Recorder([leaves[i] for i in at]))
            for context in self.contexts(enabled=autocast):
                stack.enter_context(context)
            level = _FAKE_LOG.level
            _FAKE_LOG.setLevel(logging.CRITICAL)
            try:
                call[0](*args, **kwargs)
            except Exception:
                if autocast:
                    raise
                return None
            finally:
                _FAKE_LOG.setLevel(level)
        floating = tuple(leaves[i].is_floating_point() for i in at)
        return Observation(recorder.kernels, set(recorder.casts), floating)


@dataclass(frozen=True, slots=True)
class Observation:
    """What an op ran, which of its tensor arguments it cast, which of them are floating."""

    kernels: list[Kernel]
    casts: set[tuple[int, torch.dtype]]
    floating: tuple[bool, ...]


def _core(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels that compute: neither casts nor views."""
    return [
        k
        for k in kernels
        if k[0] not in _CASTS and not any(r.alias_info is not None for r in k[0]._schema.returns)
    ]
