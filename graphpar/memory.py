"""The memory of one training step, by running its program on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from graphpar.container import Container, place
from graphpar.cost.dry_run import planned_group
from graphpar.cost.kernels import call
from graphpar.program import Program, TensorSpec, info, placeholders
from graphpar.runtime import compile_program
from graphpar.types import I, Type, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes on one device in one forward and backward.

    ``state_bytes`` are parameters, buffers and constants, ``input_bytes`` the call's arguments,
    ``gradient_bytes`` the gradients of parameters. ``forward_bytes`` is all that is alive when
    forward is done, ``peak_bytes`` the most that ever is; both include state and inputs.
    """

    state_bytes: int
    input_bytes: int
    gradient_bytes: int
    forward_bytes: int
    peak_bytes: int


def step_memory(program: Program, *, trained_inputs: Collection[str] | None = None) -> StepMemory:
    """Replay forward and backward of rank 0 and follow every storage from its making to its end.

    Backward starts from the sum of all differentiable outputs of rank 0 (a loss among them alone).
    Recomputation, transients and gathered buffers are in it; what an optimizer holds is not.
    Inputs named in ``trained_inputs`` (default: all of floating point) need a gradient.
    """
    ranks = program.ranks if program.form == "local" else 1
    with planned_group(ranks) as group, _fake():
        root, state = _state(program, ranks)
        constants = {name: _constant(value) for name, value in program.constants.items()}
        inputs = [_input(node, ranks, trained_inputs) for node in placeholders(program.graph)]
        forward = compile_program(replace(program, constants=constants), group)
        live = LiveBytes([*state, *constants.values(), *inputs])
        with live:
            results = forward(root, *inputs)
            forward_bytes = live.now
            _start(results).backward()
            del results
    trained = [p for p in state if isinstance(p, nn.Parameter) and p.grad is not None]
    return StepMemory(
        state_bytes=_bytes([*state, *constants.values()]),
        input_bytes=_bytes(inputs),
        gradient_bytes=_bytes([p.grad for p in trained]),
        forward_bytes=forward_bytes,
        peak_bytes=live.peak,
    )


def working_bytes(program: Program) -> int:
    """What a step needs at most beside all that is alive when forward is done.

    Gradients of parameters are there already, and what backward makes for them is added to them.
    Backward starts from gradients of all differentiable outputs, which count.
    """
    ranks = program.ranks if program.form == "local" else 1
    with planned_group(ranks) as group, _fake():
        root, state = _state(program, ranks)
        for parameter in state:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        grads = [x.grad for x in state if x.grad is not None]
        constants = {name: _constant(value) for name, value in program.constants.items()}
        inputs = [_input(node, ranks, None) for node in placeholders(program.graph)]
        forward = compile_program(replace(program, constants=constants), group)
        live = LiveBytes([*state, *grads, *constants.values(), *inputs])
        with live:
            results = [x for x in forward(root, *inputs) if isinstance(x, Tensor)]
            forward_bytes = live.now
            results = [x for x in results if x.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.empty_like(x) for x in results])
    return live.peak - forward_bytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that ops make, while they live; ``now`` and at the
    ``peak``. ``present`` are tensors that live already."""

    def __init__(self, present: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._held: dict[int, Any] = {}
        for x in present:
            self._see(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = call(func, args, kwargs or {})
        pytree.tree_map_only(Tensor, self._see, result)
        return result

    def _see(self, x: Tensor) -> None:
        if is_traceable_wrapper_subclass(x):  # a DTensor has no memory but its local tensor's
            return
        storage = x.untyped_storage()
        address = storage._cdata
        if address in self._held:
            return
        nbytes = storage.nbytes()

        def gone(_: Any) -> None:
            del self._held[address]
            self.now -= nbytes

        self._held[address] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _start(results: list[Any]) -> Tensor:
    """What backward starts from."""
    losses = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in losses if x.dim() == 0]
    total: Tensor = sum(x.sum() for x in scalars or losses)  # type: ignore[assignment]
    return total


@contextmanager
def _fake() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), FakeTensorMode():
        yield


def _state(program: Program, ranks: int) -> tuple[Container, list[Tensor]]:
    root, made = Container(), []
    for known in program.state.values():
        if known.kind == "constant":
            continue
        value: Tensor = _empty(known.spec, known.type, ranks)
        if known.kind == "parameter":
            value = nn.Parameter(value, requires_grad=known.spec.differentiable)
        for alias in known.names:
            place(root, alias, value)
        made.append(value)
    return root, made


def _input(node: torch.fx.Node, ranks: int, trained: Collection[str] | None) -> Tensor:
    spec, kind = info(node).spec, info(node).type
    assert isinstance(spec, TensorSpec)
    value = _empty(spec, I if kind is None else kind, ranks)  # type: ignore[arg-type]
    return value.requires_grad_(spec.differentiable and (trained is None or node.name in trained))


def _constant(value: Tensor) -> Tensor:
    """Constants may be broadcast: as many bytes as they have."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _empty(spec: TensorSpec, kind: Type, ranks: int) -> Tensor:
    shape = local_shape(spec.shape, kind, 0, ranks)
    return torch.empty(shape, dtype=spec.dtype, device=spec.device)


def _bytes(tensors: list[Any]) -> int:
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
