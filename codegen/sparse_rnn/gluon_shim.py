"""Gluon in Triton's interpreter: what the generated fast kernels use of it, in terms of Triton.

Layouts mean nothing here, shared memory is an array of the block. A gather out of bounds, or of
elements that were never written, is an error. Barriers inside a block are not modelled: Gluon's
compiler sets them.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from graphpar.codegen.sparse_rnn import emit
from graphpar.codegen.sparse_rnn.emit_fast_helpers import IMPORTS
from graphpar.errors import InternalError

int16, int32, int64, float16, float32 = tl.int16, tl.int32, tl.int64, tl.float16, tl.float32
static_range = range
_SHIM = """\
import triton as gluon
import triton.language as tl

from graphpar.codegen.sparse_rnn import gluon_shim as gl
"""


def load_fast(text: str, folder: Path) -> ModuleType:
    """The module of a fast kernel's text, with this in place of Gluon."""
    assert IMPORTS in text
    return emit.load(
        emit.write(text.replace(IMPORTS, _SHIM).replace("gl.constexpr", "tl.constexpr"), folder)
    )


class _Layout:
    def __init__(self, *args: Any) -> None:
        pass


BlockedLayout = SliceLayout = SwizzledSharedLayout = _Layout


def arange(start: int, end: int, layout: Any) -> Any:
    return tl.arange(start, end)


def zeros(shape: Any, dtype: Any, layout: Any) -> Any:
    return tl.zeros(shape, dtype)


def convert_layout(x: Any, layout: Any) -> Any:
    return x


def barrier() -> None:
    pass


_NAMES = ("load", "store", "program_id", "where", "exp2", "abs", "maximum", "minimum", "sum", "max",
          "split", "reshape", "atomic_add")  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"the kernels use no gl.{name}")
    return getattr(tl, name)


class SharedMemory:
    """An array in shared memory, or a part of one."""

    def __init__(self, dtype: Any, data: Any, written: Any) -> None:
        self._dtype, self._data, self._written = dtype, data, written

    def store(self, value: Any) -> None:
        data = value.handle.data
        if data.shape != self._data.shape:
            raise InternalError(f"{data.shape} into shared memory of {self._data.shape}")
        self._data[...] = data
        self._written[...] = True

    def load(self, layout: Any) -> Any:
        return self._tensor(self._data, self._written)

    def gather(self, index: Any, axis: int) -> Any:
        places = index.handle.data
        if (places < 0).any() or (places >= len(self._data)).any():
            raise InternalError("a gather out of the bounds of shared memory")
        return self._tensor(self._data[places], self._written[places])

    def slice(self, start: int, size: int) -> SharedMemory:
        end = start + size
        if end > len(self._data):
            raise InternalError("a slice out of the bounds of shared memory")
        return SharedMemory(self._dtype, self._data[start:end], self._written[start:end])

    def index(self, place: int) -> SharedMemory:
        return SharedMemory(self._dtype, self._data[place], self._written[place])

    def _tensor(self, data: Any, written: Any) -> Any:
        if not written.all():
            raise InternalError("shared memory that was never written is read")
        handle = interpreter.TensorHandle(data.copy(), self._dtype)
        return tl.tensor(handle, tl.block_type(self._dtype, list(data.shape)))


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> SharedMemory:
    sizes = [int(getattr(size, "value", size)) for size in shape]
    return SharedMemory(
        dtype, np.zeros(sizes, interpreter._get_np_dtype(dtype)), np.zeros(sizes, bool)
    )
