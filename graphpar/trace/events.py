"""What a layer did while it was traced: a tree of the ops that layers of one class ran.

An :class:`Event` is an op as it was called after all the ops above it in the tree. Layers that
run the same ops go the same way; where they differ, the tree branches. What equal events do is
known from the first time: :func:`key_of` holds all that the result's metadata and the node in the
exported graph follow from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.utils._python_dispatch import _disable_current_modes

from graphpar.trace.where import is_users

REGIONS = (
    torch._C._set_grad_enabled,
    autocast_mode._enter_autocast,
    autocast_mode._exit_autocast,
)
"""Calls in an exported graph that are no ops: they change how later ones run."""

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What ``torch.tensor`` calls: the result's value is known while it is traced, if it is one."""


class Unrecordable(Exception):
    """Why an op's result is not known from how it is called."""


@dataclass(frozen=True, slots=True)
class Looks:
    """What Python can see of a tensor that an op made, but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def fake(self, mode: FakeTensorMode) -> Tensor:
        """A tensor that looks so, made without running an op."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return FakeTensor(mode, self._elements(), self.device)

    def again(self, first: Tensor) -> Tensor:
        """Another one. What is the same for all, Python's attributes, it has from ``first``, which
        :meth:`fake` made and nobody else has: setting them is most of the time else."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            made = Tensor._make_subclass(
                FakeTensor,
                self._elements(),
                self.requires_grad,
                dispatch_device=True,
                device_for_backend_keys=self.device,
            )
            vars(made).update(vars(first))
        return made

    def _elements(self) -> Tensor:
        elements = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.offset:
            last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
            memory = torch.empty(self.offset + last + 1, dtype=self.dtype, device="meta")
            elements = memory.as_strided(self.shape, self.stride, self.offset)
        return elements.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that an op gave. ``place``: where among several; ``same``: the operand that it
    is, by its number; else what it looks like. ``constant``: its value, which Python may read;
    ``within``: the operand whose constant it is a view of. ``first``: one that looks so."""

    place: int | None
    same: int | None
    looks: Looks | None
    mode: FakeTensorMode
    constant: Tensor | None
    within: int | None
    first: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def fake(self, whole: Tensor | None) -> Tensor:
        """A tensor that looks like this result; ``whole``: the operand that it is ``within``."""
        assert self.looks is not None
        if self.constant is None:
            if not self.first:
                self.first.append(self.looks.fake(self.mode))
            return self.looks.again(self.first[0])
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if whole is None:
                value = self.constant.clone()
            else:
                value = as_placed(self.constant, whole.constant)  # type: ignore[attr-defined]
            # Which remembers what shares memory with it.
            make = self.mode.fake_tensor_converter.from_real_tensor
            return make(self.mode, value, make_constant=True)


@dataclass(slots=True, eq=False)
class Event:
    """``node`` is the op in a graph of its own, where placeholders stand for its ``operands``;
    ``inner`` tells which operands are values of earlier events, by their numbers. ``number``: what
    it gave Python, if it reads a constant; then it is in no graph."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    inner: tuple[int | None, ...]
    results: tuple[Result, ...]
    several: tuple[type, int] | None
    layer: str
    number: bool | float | None = None
    next: dict[Hashable, Event] = field(default_factory=dict)
    calls: dict[Hashable, Shortcut] = field(default_factory=dict)

    @property
    def is_op(self) -> bool:
        """Whether it gives tensors."""
        return self.number is None and isinstance(self.node.target, OpOverload)


@dataclass(slots=True, eq=False)
class Root:
    """Where the layers of one class begin."""

    next: dict[Hashable, Event] = field(default_factory=dict)
    calls: dict[Hashable, Shortcut] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shortcut:
    """The events of one call of a torch function. An operand of theirs is that argument of the
    call, or an inner value; ``results`` are the numbers of the values that the call gave."""

    events: tuple[tuple[Event, tuple[int | None, ...]], ...]
    results: tuple[int, ...]
    several: type | None


@dataclass(frozen=True, slots=True)
class Step:
    """An event that a layer ran: where its operands come from (a value's number, or the position
    among the run's inputs), and the module that was called."""

    event: Event
    operands: tuple[tuple[bool, int], ...]
    module: str


def state() -> Hashable:
    """What the results of ops depend on beside their arguments."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch._C._len_torch_dispatch_stack(),
    )


_PLAIN = (
    bool,
    int,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Reader:
    """Reads the arguments of a call: ``number`` tells which known value a tensor is."""

    def __init__(self, number: Callable[[Tensor], int | None], tracker: Any) -> None:
        self.number = number
        self.tracker = tracker
        self.operands: list[Tensor] = []
        self.lifts = False
        self.by_value = True
        """Whether equal keys mean operands of equal values."""

    def key(self, value: Any) -> Hashable:
        """Equal for arguments that an op cannot tell apart by more than the tensors' values."""
        if isinstance(value, Tensor):
            self.operands.append(value)
            number = self.number(value)
            return (Tensor, number) if number is not None else self.outer(value)
        kind = type(value)
        if kind is float:
            return kind, value.hex()
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, (tuple, list)):
            return tuple(map(self.key, value))
        if kind is slice:
            return kind, self.key(value.start), self.key(value.stop), self.key(value.step)
        raise Unrecordable(f"an argument is a {kind.__name__}")

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable:
        self.lifts = func in _LIFTS
        return func, self.key(tuple(args)), tuple(kwargs), self.key(tuple(kwargs.values()))

    def alike(self) -> tuple[int, ...]:
        """Which operands are one tensor: for each, the first that it is."""
        first: dict[int, int] = {}
        return tuple(first.setdefault(id(x), i) for i, x in enumerate(self.operands))

    def outer(self, value: Tensor) -> Hashable:
        """The metadata of a tensor from outside the layer."""
        slot = self.tracker.get(value)
        if slot is not None and slot.constant is not None:
            raise Unrecordable("an argument is a constant whose value is known")
        if self.lifts and type(value) is Tensor and value.numel() <= 1:
            return (Tensor, *metadata(value), content(value))
        self.by_value = False
        return (type(value), slot is None, value.is_leaf, *metadata(value))


def content(value: Tensor) -> bytes:
    """The value of a tensor that is none of the trace's."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def as_placed(value: Tensor, memory: Tensor) -> Tensor:
    """The elements of ``memory`` that lie where those of ``value`` do in its own."""
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def constant_of(value: Tensor) -> Tensor | None:
    """The value of a tensor of the trace, if Python may read it."""
    return getattr(value, "constant", None)


def metadata(value: Tensor) -> tuple[Hashable, ...]:
    shape = tuple(value.shape)
    if not all(type(size) is int for size in shape) or value.layout is not torch.strided:
        raise Unrecordable("a tensor's shape depends on values, or it is sparse")
    if value.is_conj() or value.is_neg():
        raise Unrecordable("a tensor is a lazy conjugate")
    return (
        shape,
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.device,
        value.requires_grad,
    )


def place() -> tuple[tuple[str, int], ...]:
    """File and line of the innermost frame that is the user's, and of forwards that it called."""
    found: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        users = is_users(code.co_filename)
        if users or code.co_name == "forward":
            found.append((code.co_filename, frame.f_lineno))
        if users:
            break
        frame = frame.f_back
    return tuple(found)


def results_of(out: Any, operands: Sequence[Tensor], by_value: bool) -> tuple[Result, ...]:
    """What an op gave. ``by_value``: so it does whenever it is called so, in value too.

    Raises:
        Unrecordable: other things than tensors, or tensors that are known in more than that.
    """
    constants = map(constant_of, operands)
    memory = {x.untyped_storage()._cdata: i for i, x in enumerate(constants) if x is not None}
    values = list(enumerate(out)) if isinstance(out, (tuple, list)) else [(None, out)]
    found = []
    for place, value in values:
        if value is None:
            continue
        if type(value) is not FakeTensor:
            raise Unrecordable("it gives other things than tensors")
        constant = value.constant
        if constant is not None and not by_value:
            raise Unrecordable("it gives a constant that depends on more than its arguments")
        within = None if constant is None else memory.get(constant.untyped_storage()._cdata)
        if within is not None and constant_of(operands[within]).dtype != constant.dtype:  # type: ignore[union-attr]
            raise Unrecordable("it gives the bits of a constant")
        same = next((i for i, operand in enumerate(operands) if operand is value), None)
        looks = None if same is not None else Looks(*metadata(value))  # type: ignore[arg-type]
        found.append(Result(place, same, looks, value.fake_mode, constant, within))
    return tuple(found)
