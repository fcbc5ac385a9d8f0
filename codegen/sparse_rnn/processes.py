"""Run the blocks of one Triton launch as processes, in Triton's interpreter.

Unlike :mod:`interleave` this is parallel for real: memory is what the machine's is, atomics are the
machine's, and no run repeats another. It needs tensors in shared memory and a system with fork.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graphpar.codegen.sparse_rnn.interleave import DeadlockError, interpreting
from graphpar.errors import InputError, KernelError

_POLL_S = 0.001


def launch(
    kernel: Any, programs: int, arguments: Mapping[str, Any], *, seconds: float = 60.0
) -> None:
    """Run ``programs`` blocks of ``kernel``, each in a process of its own.

    Raises:
        InputError: a tensor is not in shared memory (``Tensor.share_memory_()``).
        DeadlockError: some have not ended after ``seconds``.
        KernelError: a block failed, or Triton does not interpret.
    """
    if not interpreting():
        raise KernelError("set TRITON_INTERPRET=1 before triton is imported")
    for name, value in arguments.items():
        if isinstance(value, Tensor) and not value.is_shared():
            raise InputError(f"{name} is not in shared memory: call share_memory_()")
    children = {_start(kernel, programs, block, arguments): block for block in range(programs)}
    failed: list[int] = []
    end = time.monotonic() + seconds
    try:
        while children and not failed and time.monotonic() < end:
            for child in list(children):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    block = children.pop(child)
                    failed += [block] if status else []
            time.sleep(_POLL_S)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if failed:
        raise KernelError(f"block {failed[0]} failed; what it raised is on stderr")
    if children:
        raise DeadlockError(f"blocks {sorted(children.values())} have not ended in {seconds:g} s")


def _start(kernel: Any, programs: int, block: int, arguments: Mapping[str, Any]) -> int:
    """A child that runs one block; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _run(kernel, programs, block, arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(kernel: Any, programs: int, block: int, arguments: Mapping[str, Any]) -> None:
    from triton.runtime import interpreter

    function = kernel.rewrite()
    executor = interpreter.GridExecutor(function, kernel.arg_names, (programs,), [])
    interpreter._patch_lang(kernel.fn)
    given = inspect.getcallargs(function, **arguments)
    values = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in given.items()
    }
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(programs, 1, 1)
    builder.set_grid_idx(block, 0, 0)
    function(**values)
