"""Run a region of a program so that backward makes its values again, as far as it needs them.

``torch.utils.checkpoint`` calls the whole region a second time under autograd, to see what that
saves. Here the region's ops are numbered: what autograd saves is known by the memory it lies in,
so the second run is no more than the ops whose values backward reads, without autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import traceback
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphpar.errors import InternalError
from graphpar.ops.modes import Generators, autocast_off

Run = Callable[..., Any]
"""Runs an op: ``run(op, *args, **kwargs)``."""


def recompute(
    region: Callable[..., tuple[list[Any], list[Any]]],
    again: Callable[..., None],
    kept: Sequence[Tensor],
    passed: Sequence[Tensor] = (),
    *,
    random: bool = False,
    holds: bool = False,
) -> list[Any]:
    """The results of ``region(made, hold, *kept, *passed)``, of which autograd keeps little.

    The region calls an op through ``made(number, op, *args, **kwargs)`` if backward is to make
    its values again, and through ``hold(op, *args, **kwargs)`` if they are to be kept; it gives
    its results and those values. Autograd keeps ``kept``, these values, and what ops save of
    neither; of what the numbered ops make, nothing. When backward needs the first of it, it calls
    ``again(made, *kept, *values)``, which calls the same numbered ops on equal values. ``random``:
    from the same states of the generators. ``holds``: the region calls ``hold``.

    Raises:
        InternalError: an op saves other tensors the second time.
    """
    if torch.compiler.is_compiling():  # the compiler finds by itself what is not needed
        return _traced(region, [*kept, *passed], random=random, holds=holds)
    if not torch.is_grad_enabled():
        results, _ = region(_made, _hold, *kept, *passed)
        return results
    frame = _Frame(again, Generators([*kept, *passed]) if random else None)
    for place, x in enumerate(kept):
        frame.know(x, _KEPT, place)
    with saved_tensors_hooks(frame.pack, _unpack):
        results, held = region(frame.made, _hold, *kept, *passed)
    frame.keep([*kept, *held])
    return results


def _made(number: int, op: Run, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _hold(op: Run, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# --- under a compiler -----------------------------------------------------------------------------


def _traced(
    region: Callable[..., tuple[list[Any], list[Any]]],
    values: Sequence[Tensor],
    *,
    random: bool,
    holds: bool,
) -> list[Any]:
    def run(*given: Tensor) -> list[Any]:
        results, _ = region(_made, _marked, *given)
        return results

    contexts: dict[str, Any] = {"context_fn": _contexts} if holds else {}
    found: list[Any] = checkpoint(
        run, *values, use_reentrant=False, preserve_rng_state=random, **contexts
    )
    return found


def _marked(op: Run, *args: Any, **kwargs: Any) -> Any:
    with traceback.annotate({"graphpar_held": True}):
        return op(*args, **kwargs)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if traceback.current_meta.get("custom", {}).get("graphpar_held"):
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# --- the first run --------------------------------------------------------------------------------

_KEPT = -1
"""In place of an op's number: a value is kept."""


_Form = tuple[Any, ...] | None
"""How a tensor lies in its storage; ``None`` if it has none."""


class _Source(NamedTuple):
    """What the second run has in its hands: of the tensors that op ``number`` makes, or that are
    kept, the one at ``place``."""

    number: int
    place: int
    form: _Form
    memory: Callable[[], Any]


class _Inner(NamedTuple):
    """Of an op: how many tensors it saves, the slots of those that it makes and does not give, by
    number, and which of its arguments have a gradient."""

    saved: int
    slots: Mapping[int, int]
    trained: Sequence[bool]


_Slot = tuple["_Frame", int]
"""What autograd holds in place of a tensor."""


def _unpack(slot: _Slot) -> Tensor:
    frame, number = slot
    return frame.value(number)


class _Keep(torch.autograd.Function):
    """Lets autograd keep tensors, so that its hooks see them, as long as its result lives."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("it has no gradient")


class _Frame:
    """One run of a region, and its slots, in the order in which autograd filled them."""

    def __init__(self, again: Callable[..., None], generators: Generators | None) -> None:
        self._again, self._generators = again, generators
        self._count = 0
        self._known: dict[int, _Source] = {}  # by the id of their memory
        self._unknown: dict[int, list[tuple[int, Tensor]]] = {}
        self._uses: dict[int, list[tuple[int, _Source, _Form]]] = {}
        self._kept: dict[Any, tuple[Tensor, list[int]]] = {}  # and the slots of each
        self._inner: dict[int, _Inner] = {}
        self._keeper: Any = None
        self._slots: list[list[int]] = []  # of the last values that are kept
        self._ready: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> _Slot:
        number = self._count
        self._count += 1
        memory = _memory(x)
        source = self._known.get(id(memory))
        if source is not None and source.memory() is memory:
            self._use(number, source, x)
        else:
            self._unknown.setdefault(id(memory), []).append((number, x))
        return self, number

    def _use(self, slot: int, source: _Source, x: Tensor) -> None:
        """The slot is for ``x``, the tensor of the source or another one in its memory. What is
        kept is kept in each form: hooks may put it elsewhere."""
        form = _form(x)
        if source.number == _KEPT:
            self._kept.setdefault((source.place, form), (x, []))[1].append(slot)
        else:
            self._uses.setdefault(source.number, []).append((slot, source, form))

    def know(self, x: Tensor, number: int, place: int) -> None:
        """The second run has ``x``."""
        memory = _memory(x)
        known = self._known.get(id(memory))
        if known is not None and known.memory() is memory:
            return
        source = _Source(number, place, _form(x), weakref.ref(memory))
        self._known[id(memory)] = source
        for slot, seen in self._unknown.pop(id(memory), ()):
            self._use(slot, source, seen)

    def made(self, number: int, op: Run, *args: Any, **kwargs: Any) -> Any:
        first = self._count
        result = op(*args, **kwargs)
        for place, x in enumerate(_tensors(result)):
            self.know(x, number, place)
        if self._count > first and self._unknown:
            new = [each for each, found in self._unknown.items() if found[0][0] >= first]
            if new:
                self._find_inner(number, first, new, _tensors((*args, *kwargs.values())))
        return result

    def _find_inner(
        self, number: int, first: int, new: Sequence[int], given: Sequence[Tensor]
    ) -> None:
        """What the op saved and nobody knows is its argument, or made within it."""
        arguments = {id(_memory(getattr(x, "_local_tensor", x))) for x in given}
        made = [self._unknown.pop(each) for each in new if each not in arguments]
        if made:
            slots = {slot - first: slot for found in made for slot, _ in found}
            trained = [x.requires_grad for x in given]
            self._inner[number] = _Inner(self._count - first, slots, trained)

    def keep(self, given: Sequence[Tensor]) -> None:
        """Keep what :func:`recompute` passes on to ``again``, and all that is still unknown."""
        if not self._count:
            return
        others = [found[0][1] for found in self._unknown.values()]
        for place, x in enumerate([*given, *others]):
            self.know(x, _KEPT, place)
        values = [*given, *(x for x, _ in self._kept.values())]
        self._slots = [slots for _, slots in self._kept.values()]
        self._kept.clear()
        self._known.clear()
        anchor = torch.empty(0, requires_grad=True)
        kept = [x.detach() for x in values]
        self._keeper = _Keep.apply(anchor, *kept)  # type: ignore[no-untyped-call]

    # --- the second run ---

    def value(self, slot: int) -> Tensor:
        """What belongs into a slot; one run makes it for all, each of which takes it once."""
        if torch._C._current_graph_task_id() == -1:  # somebody looks at what autograd keeps
            return self._run()[slot]
        if slot not in self._ready:
            self._ready = self._run()
        return self._ready.pop(slot)

    def _run(self) -> dict[int, Tensor]:
        saved = self._keeper.grad_fn.saved_tensors
        count = len(saved) - len(self._slots)
        ready: dict[int, Tensor] = {}
        for x, slots in zip(saved[count:], self._slots, strict=True):
            ready |= dict.fromkeys(slots, x)
        random = nullcontext() if self._generators is None else self._generators.restored()
        with torch.no_grad(), autocast_off(), random:
            self._again(partial(self._made_again, ready), *saved[:count])
        return ready

    def _made_again(
        self, ready: dict[int, Tensor], number: int, op: Run, *args: Any, **kwargs: Any
    ) -> Any:
        inner = self._inner.get(number)
        if inner is None:
            result = op(*args, **kwargs)
        else:
            result = _observed(inner, ready, op, args, kwargs)
        uses = self._uses.get(number)
        if uses:
            values = _tensors(result)
            for slot, source, form in uses:
                value = values[source.place]
                if _form(value) != source.form:
                    raise InternalError(f"the second run of {op} gives {_form(value)}")
                ready[slot] = _placed(value, source.form, form)
        return result


def _observed(
    inner: _Inner, ready: dict[int, Tensor], op: Run, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call an op as the first time, under autograd, and take of what that saves."""
    trained = iter(inner.trained)
    count = 0

    def as_before(x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if next(trained) and not x.requires_grad else x

    def see(x: Tensor) -> None:
        nonlocal count
        slot = inner.slots.get(count)
        count += 1
        if slot is not None:
            ready[slot] = x.detach()

    args = _mapped(as_before, args)
    kwargs = {key: _mapped(as_before, value) for key, value in kwargs.items()}
    with torch.enable_grad(), saved_tensors_hooks(see, _no_backward):
        result = op(*args, **kwargs)
    if count != inner.saved:
        raise InternalError(f"the second run of {op} saves {count} tensors, not {inner.saved}")
    return _mapped(Tensor.detach, result)


def _no_backward(_: Any) -> Tensor:
    raise AssertionError("what runs again has no backward of its own")


# --- tensors and their memory ---------------------------------------------------------------------


def _memory(x: Tensor) -> Any:
    return x.untyped_storage() if x.layout is torch.strided else x


def _form(x: Tensor) -> _Form:
    if x.layout is not torch.strided:
        return None
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


def _placed(x: Tensor, own: _Form, form: _Form) -> Tensor:
    """``x``, of form ``own``, or what lies in its storage in another form."""
    if form is None or form == own:
        return x
    shape, strides, offset, dtype, conj, neg = form
    if x.dtype == dtype and not (x.is_conj() or x.is_neg()):
        found = x.as_strided(shape, strides, offset)
    else:
        found = torch.empty(0, dtype=dtype, device=x.device)
        found.set_(x.untyped_storage(), offset, shape, strides)
    found = torch._conj(found) if conj else found
    return torch._neg_view(found) if neg else found


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, (list, tuple)):
        return ()
    found: list[Tensor] = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += _tensors(each)
    return found


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_mapped(change, each) for each in value]
    return value
