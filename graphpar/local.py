"""local: what a rank holds of its parameters, as autograd sees it.

``DTensor.to_local`` makes two nodes of autograd for each parameter, and their Python is a tenth of
the step of a small model. Here one node takes all parameters that an op reads, and wraps each
gradient as a DTensor at once. Like any gradient, one that others hold too is copied first (from
``to_local`` the gradients of ``a + b`` for two parameters share memory, so that clipping scales
them twice). An op with a node of its own needs no other: it reads parameters by :func:`held` and
gives their gradients by :func:`of_parameters`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_global_tensor_info
from torch.utils import _pytree as pytree

_new_dtensor: Any = DTensor.__new__


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, which without transforms of ``torch.func`` only hands on to the method
    beneath it, by four Python calls and one for each argument."""
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return direct(*args)

    return apply


def local(value: Tensor, dim: int = 0, size: int = -1) -> Tensor:
    """What this rank holds of a parameter: of dimension ``dim`` the first ``size``, without the
    padding behind."""
    part = local_all(value)[0] if isinstance(value, DTensor) else value
    return part if size < 0 else part.narrow(dim, 0, size)


def local_all(*values: Tensor) -> list[Tensor]:
    """What this rank holds of each of several parameters that one op reads."""
    if torch.compiler.is_compiling():
        return [v.to_local() if isinstance(v, DTensor) else v for v in values]
    if not torch.is_grad_enabled():
        return [v._local_tensor if isinstance(v, DTensor) else v for v in values]
    trained = [v for v in values if isinstance(v, DTensor) and v.requires_grad]
    if not trained:
        return [v._local_tensor if isinstance(v, DTensor) else v for v in values]
    parts = _local_of(*trained)
    if len(trained) == len(values):
        return list(parts)
    found = dict(zip(map(id, trained), parts, strict=True))
    untrained = [v._local_tensor if isinstance(v, DTensor) else v for v in values]
    return [found.get(id(v), part) for v, part in zip(values, untrained, strict=True)]


def held(value: Tensor) -> Tensor:
    """What this rank holds of a parameter, apart from autograd."""
    return value._local_tensor if isinstance(value, DTensor) else value


def split_parameters(operands: Sequence[Any]) -> tuple[list[DTensor | None], list[Any]]:
    """The parameters among the operands, in their places, which a node may keep; and what this
    rank holds of all operands."""
    parameters: list[DTensor | None] = []
    parts = []
    for x in operands:
        if isinstance(x, DTensor):
            parameters.append(x)
            parts.append(x._local_tensor)
        else:
            parameters.append(None)
            parts.append(x)
    return parameters, parts


def seen(parts: Sequence[Any], parameters: Sequence[DTensor | None]) -> list[Any]:
    """What a node saved of its operands, as autograd sees it."""
    return [
        part if part is None or parameter is None else local(parameter)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def of_parameters(
    grads: Sequence[Tensor | None], parameters: Sequence[DTensor | None]
) -> list[Tensor | None]:
    """Gradients of what the rank holds, which nothing else holds, as those of the parameters."""
    plain, made = not torch.is_grad_enabled(), []
    for grad, parameter in zip(grads, parameters, strict=True):
        if grad is not None and parameter is not None:
            spec, strides = parameter._spec, parameter._local_tensor.stride()
            if plain and grad.stride() == strides:
                grad = _new_dtensor(_Gradient, grad, spec, requires_grad=False)
            else:
                grad = _as_dtensor(grad, spec, strides)
        made.append(grad)
    return made


class _Gradient(DTensor):
    """A gradient on its way to its parameter, where autograd detaches it, and it is a DTensor.

    DTensor's own way through a ``detach`` is twenty Python calls and the largest part of what
    DTensors cost a step. Ops are those of the DTensor; hooks and ``autograd.grad`` see this class.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _detach:
            x = args[0]
            return _new_dtensor(DTensor, x._local_tensor, x._spec, requires_grad=False)
        args, kwargs = pytree.tree_map_only(_Gradient, _Gradient._bare, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _bare(self) -> Tensor:
        made: Tensor = _new_dtensor(DTensor, self._local_tensor, self._spec, requires_grad=False)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._bare().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._bare(), memo)


_detach = torch.ops.aten.detach.default


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs = [p._spec for p in parameters]
        parts = [p._local_tensor for p in parameters]
        ctx.strides = [part.stride() for part in parts]
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made: list[Tensor | None] = []
        for place, grad in enumerate(grads):
            if grad is not None:
                shared = any(grad is other for other in grads[:place])
                if (shared or grad._use_count() > _ALONE) and not torch.is_grad_enabled():  # type: ignore[attr-defined]
                    grad = grad.clone()
                grad = _as_dtensor(grad, ctx.specs[place], ctx.strides[place])
            made.append(grad)
        return tuple(made)


_local_of = applied(_Local)


def _uses_alone() -> int:
    """The uses of a gradient in a node's backward if nothing else holds it: in torch 2.11 the
    tensor of Python's counts too."""
    found: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            found.append(grads[0]._use_count())  # type: ignore[attr-defined]
            return grads[0]

    with torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        (applied(Probe)(x) * 2).backward()
    return found[0]


_ALONE = _uses_alone()


def _as_dtensor(grad: Tensor, spec: Any, strides: tuple[int, ...]) -> Tensor:
    """A gradient laid out over the ranks as the parameter is."""
    if grad.stride() == strides and not torch.is_grad_enabled():
        made: Tensor = _new_dtensor(_Gradient, grad, spec, requires_grad=False)
        return made
    _, stride = compute_global_tensor_info(grad, spec.mesh, spec.placements)
    return DTensor.from_local(
        grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=tuple(stride)
    )
