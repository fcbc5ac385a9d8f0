"""Buffers that a forward gives new tensors, rather than writing to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.trace.where import forward_line, trace_error


@contextmanager
def assignments_written(model: nn.Module) -> Iterator[None]:
    """Within, the model's forward ends by writing to each buffer what it was given, as
    ``torch.export`` does for the root's own only; those of other modules it would lose.

    Raises:
        TraceError: a buffer changes its form, is filled or emptied, or has other names that would
            keep the old tensor.
    """
    before: list[tuple[nn.Module, str, str, Tensor | None]] = []

    def remember(module: nn.Module, arguments: Any) -> None:
        before[:] = [
            (part, name, f"{path}.{name}".lstrip("."), buffer)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
        ]

    def write(module: nn.Module, arguments: Any, result: Any) -> None:
        given = [(*each, each[0]._buffers.get(each[1])) for each in before]
        for part, name, _, old in before:  # an error leaves the model as it was
            part._buffers[name] = old
        for part, _, full, old, new in given:
            if new is old:
                continue
            if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                raise trace_error(
                    f"forward replaces the buffer {full}, {_form(old)}, by {_form(new)}; legal: a "
                    "tensor of the same shape and dtype",
                    forward_line(part),
                )
            if sum(other is old for *_, other in before) > 1:
                raise trace_error(
                    f"forward replaces the buffer {full}, which has several names; write to it",
                    forward_line(part),
                )
            if part is not module:
                with torch.no_grad():
                    old.copy_(new)

    handles = (
        model.register_forward_pre_hook(remember, prepend=True),
        model.register_forward_hook(write),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _form(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{list(buffer.shape)} of {buffer.dtype}"
