"""Models of transformers compute norms, softmax and losses in float32 whatever the dtype of the
model; in here they compute in float64, so that a rewritten model can be compared to the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _widening(call: Callable[..., Any]) -> Callable[..., Any]:
    def wide(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            args = tuple(map(_wide, args))
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return call(x, *args, **kwargs)

    return wide


@contextmanager
def float64_inside() -> Iterator[None]:
    """Within, ``x.float()``, ``x.to(torch.float32)`` and the like keep a float64 ``x``."""
    to, single = Tensor.to, Tensor.float

    def float_(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else single(x)

    with (
        mock.patch.object(Tensor, "float", float_),
        mock.patch.object(Tensor, "to", _widening(to)),
        mock.patch.object(Tensor, "type", _widening(Tensor.type)),
        mock.patch.object(F, "softmax", _widening(F.softmax)),
        mock.patch.object(torch, "softmax", _widening(torch.softmax)),
    ):
        yield
