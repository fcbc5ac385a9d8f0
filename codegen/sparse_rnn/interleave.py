"""Run the blocks of one Triton launch at the same time, in Triton's interpreter.

The interpreter runs blocks one after another, so that a block that waits for another one waits
forever. Here each block is a thread, and one runs at a time: at every access to memory a seeded
scheduler picks who goes on, so that a run can be repeated. A run in which no block writes for long
is a deadlock, an error that names the blocks.

``weak`` makes memory adversarial, as far as PTX allows: stores to the given tensors become visible
to others word by word, in any order, unless an atomic releases them; loads that are neither
volatile nor atomic see what their block saw first, until an atomic acquires. Not modelled: threads
inside a block, stale volatile loads.
"""

from __future__ import annotations

import ctypes
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from graphpar.errors import KernelError


class DeadlockError(KernelError):
    """Blocks wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``seed`` of the scheduler; ``weak`` memory on the ``shared`` tensors (by default on all);
    ``patience``: accesses per block without a store after which it is a deadlock."""

    seed: int = 0
    weak: bool = False
    shared: Sequence[Tensor] = ()
    patience: int = 400


def interpreting() -> bool:
    """Whether Triton was imported with ``TRITON_INTERPRET=1``, which this module needs."""
    try:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return False
    return isinstance(tl.sum, InterpretedFunction)


def launch(
    kernel: Any, programs: int, arguments: Mapping[str, Any], schedule: Schedule = Schedule()
) -> int:
    """Run ``programs`` blocks of ``kernel`` together; returns the accesses to memory.

    Raises:
        DeadlockError: all blocks that are left only read.
        KernelError: Triton does not interpret.
    """
    if not interpreting():
        raise KernelError("set TRITON_INTERPRET=1 before triton is imported")
    from triton.runtime import interpreter

    with _patched(interpreter, kernel) as builder:
        function = kernel.rewrite()
        executor = interpreter.GridExecutor(function, kernel.arg_names, (programs,), [])
        given = inspect.getcallargs(function, **arguments)
        values = {
            name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
            for name, value in given.items()
        }
        run = _Run(programs, schedule)
        builder.set_grid_dim(programs, 1, 1)
        builder.run = run
        run.go(lambda: function(**values))
        return run.accesses


@dataclass(slots=True)
class _Memory:
    """What one block has written that others do not see yet, and what it saw first."""

    pending: dict[int, list[bytes]] = field(default_factory=dict)
    seen: dict[int, Any] = field(default_factory=dict)


class _Run:
    def __init__(self, count: int, schedule: Schedule) -> None:
        self.accesses = self._last_store = 0
        self._count, self._schedule = count, schedule
        self._random = random.Random(schedule.seed)
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._back = threading.Semaphore(0)
        self._alive = set(range(count))
        self._error: BaseException | None = None
        self._memory = [_Memory() for _ in range(count)]
        self._ranges = [
            (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in schedule.shared
        ]
        self.block = 0

    # --- scheduling: the semaphores let one thread run at a time ---

    def go(self, body: Callable[[], None]) -> None:
        def run(block: int) -> None:
            self._turns[block].acquire()
            try:
                if self._error is None:
                    body()
            except BaseException as error:
                self._error = self._error or error
            self._alive.discard(block)
            self._back.release()

        threads = [threading.Thread(target=run, args=(b,), daemon=True) for b in range(self._count)]
        for thread in threads:
            thread.start()
        while self._alive:
            self.block = self._random.choice(sorted(self._alive))
            self._turns[self.block].release()
            self._back.acquire()
        for block, thread in enumerate(threads):
            thread.join()
            self._publish(block)  # a block's end is no release, the launch's is
        if self._error is not None:
            raise _cause(self._error)

    def access(self, *, stores: bool) -> None:
        """A point at which another block may go on."""
        self.accesses += 1
        if stores:
            self._last_store = self.accesses
        if self._schedule.weak:
            self._leak()
        if self.accesses - self._last_store > self._schedule.patience * self._count:
            if any(memory.pending for memory in self._memory):
                for block in range(self._count):
                    self._publish(block)
            else:
                raise DeadlockError(f"blocks {sorted(self._alive)} only read, and wait")
        block = self.block
        self._back.release()
        self._turns[block].acquire()
        if self._error is not None:
            raise self._error

    # --- weak memory ---

    def weak(self, address: Any) -> bool:
        if not self._schedule.weak:
            return False
        first = int(address.flat[0])
        return not self._ranges or any(low <= first < high for low, high in self._ranges)

    def store(self, address: Any, value: Any, mask: Any) -> None:
        """Keep back a store of the running block."""
        pending = self._memory[self.block].pending
        value, mask = (np.broadcast_to(x, address.shape) for x in (value, mask))
        for at, word, there in zip(address.flat, value.flat, mask.flat, strict=True):
            if there:
                pending.setdefault(int(at), []).append(word.tobytes())
        self._last_store = self.accesses

    def own_stores(self, address: Any) -> None:
        """A block sees its own stores: make those to ``address`` visible."""
        pending = self._memory[self.block].pending
        for at in {int(a) for a in address.flat} & pending.keys():
            for word in pending.pop(at):
                ctypes.memmove(at, word, len(word))

    def stale(self, address: Any, found: Any, mask: Any) -> Any:
        """What a plain load of the running block gives in place of ``found``."""
        seen, result = self._memory[self.block].seen, found.copy()
        mask = np.broadcast_to(mask, address.shape)
        for place in np.ndindex(address.shape):
            if mask[place]:
                result[place] = seen.setdefault(int(address[place]), found[place])
        return result

    def release(self) -> None:
        self._publish(self.block)

    def acquire(self) -> None:
        self._memory[self.block].seen.clear()

    def _publish(self, block: int) -> None:
        pending = self._memory[block].pending
        if pending:
            self._last_store = self.accesses
        for at, words in pending.items():
            for word in words:
                ctypes.memmove(at, word, len(word))
        pending.clear()

    def _leak(self) -> None:
        """Some of what was kept back becomes visible, each address in its own order."""
        for memory in self._memory:
            if memory.pending and self._random.random() < 0.5:
                known = list(memory.pending)
                for at in self._random.sample(known, max(1, len(known) // 3)):
                    word = memory.pending[at].pop(0)
                    ctypes.memmove(at, word, len(word))
                    self._last_store = self.accesses
                    if not memory.pending[at]:
                        del memory.pending[at]


def _cause(error: BaseException) -> BaseException:
    """The first error of a chain that is ours: the interpreter wraps what kernels raise."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KernelError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


@contextmanager
def _patched(interpreter: Any, kernel: Any) -> Iterator[Any]:
    """The interpreter's builder, with blocks that take turns; as it was, afterwards."""
    builder = interpreter.interpreter_builder
    before, patch, options = type(builder), interpreter._patch_lang, builder.options
    scopes: dict[int, Any] = {}

    def patch_once(function: Any) -> Any:
        """Calls of helpers patch the language anew each time, which takes most of the time."""
        key = id(function.__globals__)
        if key not in scopes:
            scopes[key] = patch(function)
        return scopes[key]

    builder.__class__ = _builder_class(interpreter)
    # Overflows are computed, a third of the time, and told of in debugging alone.
    builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._patch_lang = patch_once
    try:
        patch_once(kernel.fn)
        yield builder
    finally:
        interpreter._patch_lang = patch
        builder.__class__, builder.options = before, options
        vars(builder).pop("run", None)
        for scope in reversed(scopes.values()):
            scope.restore()


def _builder_class(interpreter: Any) -> type:
    base: Any = interpreter.InterpreterBuilder

    class Interleaved(base):  # type: ignore[misc]
        run: _Run

        @property
        def grid_idx(self) -> tuple[int, int, int]:
            return self.run.block, 0, 0

        def create_masked_load(
            self, ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, volatile: bool
        ) -> Any:
            self.run.access(stores=False)
            address = ptrs.data
            weak = self.run.weak(address)
            if weak:
                self.run.own_stores(address)
            found = super().create_masked_load(ptrs, mask, other, cache, eviction, volatile)
            if weak and not volatile:
                data = self.run.stale(address, found.data, mask.data)
                return interpreter.TensorHandle(data, found.dtype)
            return found

        def create_masked_store(
            self, ptrs: Any, value: Any, mask: Any, cache: Any, eviction: Any
        ) -> Any:
            self.run.access(stores=True)
            if self.run.weak(ptrs.data):
                return self.run.store(ptrs.data, value.data, mask.data)
            return super().create_masked_store(ptrs, value, mask, cache, eviction)

        def create_atomic_rmw(
            self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any
        ) -> Any:
            self._before_atomic(ptr, sem, stores=bool(np.any(value.data)))
            found = super().create_atomic_rmw(op, ptr, value, mask, sem, scope)
            self._after_atomic(sem)
            return found

        def create_atomic_cas(self, ptr: Any, cmp: Any, value: Any, sem: Any, scope: Any) -> Any:
            self._before_atomic(ptr, sem, stores=False)
            found = super().create_atomic_cas(ptr, cmp, value, sem, scope)
            self._after_atomic(sem)
            return found

        def _before_atomic(self, ptr: Any, sem: Any, *, stores: bool) -> None:
            self.run.access(stores=stores)
            self.run.own_stores(ptr.data)
            if "release" in str(sem).lower():
                self.run.release()

        def _after_atomic(self, sem: Any) -> None:
            if "acquire" in str(sem).lower():
                self.run.acquire()

    return Interleaved
