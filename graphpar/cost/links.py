"""The results of a block's call, from those of another call of it on alike arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphpar.errors import InternalError

_Made = list[tuple[Tensor, bool]]


class _Link(torch.autograd.Function):
    """Makes the results of a block's call, so that what leads to its arguments is kept."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], _Made], *args: Any) -> tuple[Tensor, ...]:
        made = make()
        ctx.mark_non_differentiable(*(x for x, grad in made if not grad))
        return tuple(x for x, _ in made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InternalError("a call's results have no gradient")


def linked(
    outputs: Sequence[int | None], mine: Mapping[int | None, Any], forms: Sequence[Any]
) -> list[Any]:
    """Tensors of the results' forms. ``outputs`` are the storages of the results: memory of the
    arguments ``mine``, or memory of their own that they may share."""
    results = list(forms)
    fresh: list[int] = []
    for place, (number, form) in enumerate(zip(outputs, forms, strict=True)):
        if number in mine:
            base = mine[number]
            results[place] = base.as_strided(form.shape, form.stride(), form.storage_offset())
        elif number is not None:
            fresh.append(place)

    def make() -> _Made:
        bases: dict[int | None, Tensor] = {}
        made = []
        for place in fresh:
            form, number = forms[place], outputs[place]
            if number not in bases:
                nbytes = form.untyped_storage().nbytes()
                bases[number] = torch.empty(nbytes, dtype=torch.uint8, device=form.device)
            flat = bases[number].view(form.dtype) if form.dtype != torch.uint8 else bases[number]
            view = flat.as_strided(form.shape, form.stride(), form.storage_offset())
            made.append((view, form.requires_grad))
        return made

    anchor = torch.empty(0, requires_grad=True)
    values = _Link.apply(make, anchor, *(x for x in mine.values() if isinstance(x, Tensor)))  # type: ignore[no-untyped-call]
    for place, value in zip(fresh, values, strict=True):
        results[place] = value
    return results
