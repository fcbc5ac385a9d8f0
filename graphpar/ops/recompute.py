"""Run a region of a program so that backward runs it again, up to what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphpar.errors import InternalError

Run = Callable[..., Any]
"""Runs an op: ``run(op, *args, **kwargs)``."""


def results_of(func: Any, result: Any) -> list[Tensor]:
    """What a kernel makes; of a view, nothing."""
    if func.is_view:
        return []
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]


def recompute(
    region: Callable[..., Any],
    kept: Sequence[Tensor],
    passed: Sequence[Tensor] = (),
    *,
    random: bool = False,
    holds: bool = False,
) -> Any:
    """``region(run, *kept, *passed)``, of which autograd keeps ``kept`` alone.

    Backward calls the region again, without reentering autograd, and stops when it has what it
    needs (:func:`torch.utils.checkpoint.checkpoint`). It calls the ops whose results it does not
    need through ``run``: they tell autograd what they keep, and compute nothing. They may read
    ``passed``, which is not kept. ``random``: restore the state of the generators.

    ``holds``: the region is called as ``region(run, hold, *kept, *passed)``. The second time
    ``hold(places, op, *args, **kwargs)`` computes nothing either: of the tensors that the op's
    kernels make, views left out, those of the numbers ``places`` are kept, beside ``kept``. The op
    must take the same kernels on the meta device.

    Raises:
        InternalError: it does not.
    """
    if torch.compiler.is_compiling():  # the compiler finds by itself what is not needed
        return _traced(region, [*kept, *passed], random=random, holds=holds)
    passed_now = list(passed)
    forms = [(_forms(x), x.requires_grad) for x in passed]
    held = _Held()
    calls = 0

    def run(*values: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            ways = (_call, held.record) if holds else (_call,)
            return region(*ways, *values, *passed_now)
        ways = (_pretend, held.replayer()) if holds else (_pretend,)
        with _no_other_modes():
            pretended = [_without_values(f).requires_grad_(trained) for f, trained in forms]
        return region(*ways, *values, *pretended)

    result = checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=random)
    passed_now.clear()
    held.keep()
    return result


def _call(op: Run, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _pretend(op: Run, *args: Any, **kwargs: Any) -> Any:
    viewed = args[0] if getattr(op, "is_view", False) else None
    with _no_other_modes() if viewed is not None and _is_pretended(viewed) else _Pretend():
        return op(*args, **kwargs)


# --- under a compiler -----------------------------------------------------------------------------


def _traced(
    region: Callable[..., Any], values: Sequence[Tensor], *, random: bool, holds: bool
) -> Any:
    if not holds:
        run = partial(region, _call)
        return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=random)
    return checkpoint(
        partial(region, _call, _marked),
        *values,
        use_reentrant=False,
        preserve_rng_state=random,
        context_fn=_contexts,
    )


def _marked(places: tuple[int, ...], op: Run, *args: Any, **kwargs: Any) -> Any:
    with traceback.annotate({"graphpar_held": True}):
        return op(*args, **kwargs)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if traceback.current_meta.get("custom", {}).get("graphpar_held"):
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# --- what is held ---------------------------------------------------------------------------------


class _Keep(torch.autograd.Function):
    """Lets autograd keep tensors, so that its hooks see them, as long as its node lives."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("it has no gradient")


class _Held:
    """The tensors that are held of one run of a region, in the order of their calls."""

    def __init__(self) -> None:
        self._values: list[list[Tensor]] = []
        self._makers: list[list[Any]] = []
        self._node: Any = None

    def record(self, places: Sequence[int], op: Run, *args: Any, **kwargs: Any) -> Any:
        with _Record(places) as mode:
            result = op(*args, **kwargs)
        self._values.append(mode.found)
        self._makers.append(mode.makers)
        return result

    def keep(self) -> None:
        values, self._values = self._values, []
        if torch.is_grad_enabled():
            anchor = torch.empty(0, requires_grad=True)
            flat = [x for each in values for x in each]
            self._node = _Keep.apply(anchor, *flat).grad_fn  # type: ignore[no-untyped-call]

    def replayer(self) -> Run:
        """``hold`` of one second run."""
        given = self._given()

        def replay(places: Sequence[int], op: Run, *args: Any, **kwargs: Any) -> Any:
            with _Pretend(dict(zip(places, next(given), strict=True))):
                return op(*args, **kwargs)

        return replay

    def _given(self) -> Iterator[list[tuple[Any, Tensor]]]:
        values = iter(self._node.saved_tensors)
        for makers in self._makers:
            yield [(maker, next(values)) for maker in makers]


class _Record(TorchDispatchMode):
    """Remembers some of the tensors that kernels make."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Tensor] = []
        self.makers: list[Any] = []
        self._places, self._count = frozenset(places), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in results_of(func, result):
            if self._count in self._places:
                self.found.append(x.detach())  # apart from what autograd makes of it
                self.makers.append(func)
            self._count += 1
        return result


# --- the second run -------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A tensor but for its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Constant(NamedTuple):
    """An argument that is no tensor. Numbers that are equal, of other types, are other ones."""

    type: type
    value: Any


def _forms(x: Any) -> Any:
    """``x``, of tensors their forms; hashable where its constants are."""
    if isinstance(x, Tensor):
        return _Form(x.shape, x.stride(), x.dtype)
    if not isinstance(x, list | tuple):
        return _Constant(type(x), x)
    return tuple(
        [_Form(y.shape, y.stride(), y.dtype) if isinstance(y, Tensor) else _forms(y) for y in x]
    )


def _without_values(x: Any) -> Any:
    """What has these forms, on the meta device."""
    if isinstance(x, _Form):
        return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
    return x.value if isinstance(x, _Constant) else tuple(map(_without_values, x))


@lru_cache(maxsize=4096)
def _forms_made(func: Any, default: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The forms that an op makes of forms: many meta kernels are slow Python."""
    return _forms(_made(func, _without_values(args), dict(_without_values(kwargs))))


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


class _Pretend(TorchDispatchMode):
    """Views of tensors with values are made; every other op gives tensors without values, or of
    the tensors that kernels make those given, with their kernels."""

    def __init__(self, given: Mapping[int, tuple[Any, Tensor]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given, self._count = given or {}, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a checkpoint's second run does

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with _no_other_modes():
            if func.is_view:  # of one tensor
                return func(*args, **kwargs)
            result = self._result(func, args, kwargs)
        return self._next(func, result) if self._given else result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "aten" and not func._schema.is_mutable:  # a function of forms alone
            key = (_forms(args), _forms(list(kwargs.items())) if kwargs else ())
            try:
                return _without_values(_forms_made(func, torch.get_default_dtype(), *key))
            except TypeError:  # a constant that has no hash
                pass
        args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        return _made(func, args, kwargs)

    def _next(self, func: Any, result: Any) -> Any:
        """``result``, or where a tensor is known, that."""
        if isinstance(result, list | tuple):
            return tuple(self._next(func, x) for x in result)
        if not isinstance(result, Tensor):
            return result
        maker, known = self._given.get(self._count, (func, result))
        if maker is not func:
            raise InternalError(f"a second run calls {func} in place of {maker}")
        self._count += 1
        return known.detach() if known is not result else result


def _no_other_modes() -> AbstractContextManager[Any]:
    """Modes that count what runs do not see what only pretends to."""
    others = torch._C._len_torch_dispatch_stack()
    return _disable_current_modes() if others else nullcontext()


def _is_pretended(x: Tensor) -> bool:
    """Where memory is predicted, what has a value is a FakeTensor, on the meta device too."""
    return x.is_meta and not isinstance(x, FakeTensor)


def _to_meta(x: Tensor) -> Tensor:
    made: Tensor = x if _is_pretended(x) else _without_values(_forms(x))
    return made
