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
    """An array in shared memory, or a part of one.

    ``room`` and ``written``: bytes of the whole, and whether they were stored to; ``start``: of
    this array in it, whose end may lie beyond that of the room.
    """

    def __init__(self, dtype: Any, shape: list[int], room: Any, written: Any, start: int) -> None:
        self._dtype, self._shape = dtype, shape
        self._room, self._written, self._start = room, written, start
        self._type = np.dtype(interpreter._get_np_dtype(dtype))

    @property
    def dtype(self) -> Any:
        return self._dtype

    def store(self, value: Any) -> None:
        data = value.handle.data
        if list(data.shape) != self._shape:
            raise InternalError(f"{data.shape} into shared memory of {self._shape}")
        if self._end() > len(self._room):
            raise InternalError("a store out of the bounds of shared memory")
        raw = np.ascontiguousarray(data, self._type).reshape(-1).view(np.uint8)
        self._room[self._start : self._end()] = raw
        self._written[self._start : self._end()] = True

    def load(self, layout: Any) -> Any:
        return self._tensor(np.arange(np.prod(self._shape)).reshape(self._shape))

    def gather(self, index: Any, axis: int) -> Any:
        places = index.handle.data
        if (places < 0).any() or (places >= self._shape[0]).any():
            raise InternalError("a gather out of the bounds of shared memory")
        return self._tensor(places)

    def slice(self, start: int, size: int) -> SharedMemory:
        if start + size > self._shape[0]:
            raise InternalError("a slice out of the bounds of shared memory")
        return self._part(self._dtype, [size], start * self._type.itemsize)

    def index(self, place: int) -> SharedMemory:
        if not 0 <= place < self._shape[0]:
            raise InternalError("a line out of the bounds of shared memory")
        each = int(np.prod(self._shape[1:])) * self._type.itemsize
        return self._part(self._dtype, self._shape[1:], place * each)

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> SharedMemory:
        return self._part(dtype, _sizes(shape), 0)

    def _part(self, dtype: Any, shape: list[int], start: int) -> SharedMemory:
        return SharedMemory(dtype, shape, self._room, self._written, self._start + start)

    def _end(self) -> int:
        return self._start + int(np.prod(self._shape) * self._type.itemsize)

    def _tensor(self, places: Any) -> Any:
        size = self._type.itemsize
        at = (self._start + places * size)[..., None] + np.arange(size)
        if (at >= len(self._room)).any():
            raise InternalError("a read out of the bounds of shared memory")
        if not self._written[at].all():
            raise InternalError("shared memory that was never written is read")
        data = np.ascontiguousarray(self._room[at]).view(self._type)[..., 0]
        handle = interpreter.TensorHandle(data, self._dtype)
        return tl.tensor(handle, tl.block_type(self._dtype, list(data.shape)))


def _sizes(shape: Any) -> list[int]:
    return [int(getattr(size, "value", size)) for size in shape]


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> SharedMemory:
    sizes = _sizes(shape)
    nbytes = int(np.prod(sizes)) * np.dtype(interpreter._get_np_dtype(dtype)).itemsize
    return SharedMemory(dtype, sizes, np.zeros(nbytes, np.uint8), np.zeros(nbytes, bool), 0)
