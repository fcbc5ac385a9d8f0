"""Whose memory a tensor is, without keeping it; and answers of a device that are awaited late."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Owner:
    """A place in memory, and what was there.

    The weak reference keeps the storage's address from being used again, so that another tensor is
    never taken for this one; views share the version of what they are views of.
    """

    storage: StorageWeakRef | None
    place: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None = None
    version: int | None = None

    @classmethod
    def none(cls) -> Owner:
        return cls(None)

    @classmethod
    def of(cls, x: Tensor) -> Owner:
        version = None if x.is_inference() else x._version
        return cls(StorageWeakRef(x.untyped_storage()), _place(x), version)

    def has(self, x: Tensor) -> bool:
        """Whether ``x`` is this tensor, or a view of all of it."""
        if self.storage is None or self.place != _place(x):
            return False
        return bool(self.storage == StorageWeakRef(x.untyped_storage()))

    def stands(self, x: Tensor) -> bool:
        """Whether ``x`` is this tensor and no op has written to it since."""
        return self.has(x) and not x.is_inference() and self.version == x._version

    def gone(self) -> bool:
        """Whether nothing holds the memory any more."""
        return self.storage is None or bool(self.storage.expired())


def _place(x: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), int(x.storage_offset()), tuple(x.shape), tuple(x.stride())


class Later:
    """A flag of a device: the copy to the host begins now, and only that is waited for."""

    def __init__(self, flag: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not flag.is_cuda:
            self._host = flag.clone()
            return
        self._host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
        self._host.copy_(flag, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(flag.device))

    def ready(self) -> bool:
        """Whether the answer is there."""
        return self._event is None or self._event.query()

    def value(self) -> bool:
        """The flag; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host)
