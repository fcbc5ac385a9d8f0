"""Where a matrix has non-zeros, as rows of a library's sparse format, and a memory of patterns.

Values change at every step of training; the pattern mostly stands. It is looked up by what a
thousand places of the matrix show and then checked whole, so a pattern that grew is never missed.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_PROBES = 1024
_INT = torch.int32  # MKL's own; with int64 each product converts


@dataclass(frozen=True, slots=True)
class Pattern:
    """The non-zeros of a [rows, columns] matrix, and of its transpose.

    Attributes:
        source: int64 [nonzeros], places in the flattened matrix, ascending.
        starts, columns: the sparse rows (CSR).
        turned: int64 [nonzeros], the order of ``source`` in the transpose.
        turned_starts, turned_columns: the sparse rows of the transpose.
    """

    shape: tuple[int, int]
    source: Tensor
    starts: Tensor
    columns: Tensor
    turned: Tensor
    turned_starts: Tensor
    turned_columns: Tensor

    def values(self, weight: Tensor) -> Tensor | None:
        """The values of ``weight`` at the pattern; ``None`` if it has non-zeros elsewhere."""
        flat = weight.reshape(-1)
        found = flat.index_select(0, self.source)
        return found if _nonzeros(found) == _nonzeros(flat) else None

    def matrix(self, values: Tensor) -> Tensor:
        return _csr(self.starts, self.columns, values, self.shape)

    def transpose(self, values: Tensor) -> Tensor:
        turned = values.index_select(0, self.turned)
        return _csr(self.turned_starts, self.turned_columns, turned, self.shape[::-1])


def _nonzeros(x: Tensor) -> int:
    if x.device.type != "cpu":
        return int(torch.count_nonzero(x))
    return int(np.count_nonzero((x != 0).numpy()))  # several times as fast


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        for message in ("Sparse CSR tensor support is in beta", "Sparse invariant checks are impl"):
            warnings.filterwarnings("ignore", message=message)
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def pattern_of(weight: Tensor) -> Pattern:
    """The pattern of a matrix [rows, columns]."""
    rows, columns = weight.shape
    source = torch.nonzero(weight.reshape(-1)).flatten()
    row = source // max(columns, 1)
    column = source - row * columns
    turned = torch.argsort(column, stable=True)
    return Pattern(
        (rows, columns),
        source,
        _starts(row, rows),
        column.to(_INT),
        turned,
        _starts(column, columns),
        row[turned].to(_INT),
    )


def _starts(index: Tensor, count: int) -> Tensor:
    starts = torch.zeros(count + 1, dtype=_INT, device=index.device)
    starts[1:] = torch.bincount(index, minlength=count).cumsum(0)
    return starts


class Patterns:
    """The patterns of the last ``size`` matrices; what it gives depends on the matrix alone."""

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._known: OrderedDict[Hashable, Pattern] = OrderedDict()
        self._lock = threading.Lock()  # autograd runs backward in threads of its own

    def of(self, weight: Tensor) -> tuple[Pattern, Tensor]:
        """The pattern of ``weight`` and its values there."""
        weight = weight.detach()
        key = _key(weight)
        with self._lock:
            known = self._known.get(key)
        values = None if known is None else known.values(weight)
        if known is None or values is None:
            known = pattern_of(weight)
            values = weight.reshape(-1).index_select(0, known.source)
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        return known, values


def _key(weight: Tensor) -> Hashable:
    flat = weight.reshape(-1)
    probes = flat[:: max(1, flat.numel() // _PROBES)] != 0
    return tuple(weight.shape), weight.device, bytes(probes.cpu().numpy())
