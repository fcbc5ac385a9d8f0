"""Compile generated kernels for a GPU on a machine without one, in a process of their own.

A fault of the compiler may abort the process, and Triton interprets or compiles depending on what
the environment was when it was imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphpar.codegen.sparse_rnn import emit_fast_parts
from graphpar.codegen.sparse_rnn.devices import WARP, device_of
from graphpar.codegen.sparse_rnn.emit import arguments
from graphpar.codegen.sparse_rnn.emit_common import sizes
from graphpar.codegen.sparse_rnn.emit_fast import constants
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.spec import KernelSpec
from graphpar.errors import KernelError

SECONDS = 240
_TYPES = {"exchange_ptr": "*i64", "steps": "i32"}
_TYPES |= dict.fromkeys(
    ("word_ptr", "column_ptr", "slot_ptr", "unit_ptr", "counter_ptr", "error_ptr", "clock_ptr"),
    "*i32",
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """PTX, machine code as text, and what a block needs.

    ``registers`` per thread, ``stack_bytes`` per thread (spills, if not 0), ``shared_bytes``.
    """

    arch: str
    ptx: str
    sass: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return self.warps * WARP


def signature(spec: KernelSpec) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the arguments, and the constants, of a generated kernel."""
    names = arguments(spec)
    return {n: _TYPES.get(n, "*fp32") for n in names}, {**sizes(spec), "SPIN": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A kernel to compile.

    Attributes:
        path: of the generated file. name: of the kernel in it.
        types: of the run-time arguments, in Triton's spelling. constants: of the others.
        options: of the compiler, such as ``maxnreg``.
    """

    path: Path
    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    arch: str
    warps: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "name": self.name,
            "types": dict(self.types),
            "constants": dict(self.constants),
            "capability": device_of(self.arch).capability,
            "options": {"num_warps": self.warps, **self.options},
        }


def order_of(spec: KernelSpec, path: Path, *, arch: str, warps: int = 8) -> Order:
    """The order for the reference kernel of ``spec``, whose text is at ``path``."""
    types, constants = signature(spec)
    return Order(
        path=path, name=spec.part, types=types, constants=constants, arch=arch, warps=warps
    )


def fast_order(spec: FastSpec, path: Path, *, arch: str) -> Order:
    """The order for the fast kernel of ``spec``, whose text is at ``path``.

    Registers are capped so that a block fits: the compiler may use fewer and spill, else.
    """
    most = device_of(arch).registers // spec.threads
    return Order(
        path=path,
        name=spec.part,
        types={name: _TYPES.get(name, "*fp32") for name in emit_fast_parts.arguments(spec)},
        constants={**constants(spec), "SPIN": True},
        arch=arch,
        warps=spec.warps,
        options={"maxnreg": min(255, most)},
    )


def compile_all(orders: Sequence[Order]) -> list[Compiled]:
    """Compile in one other process, one after another.

    Raises:
        KernelError: with what the compiler said.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("compile_worker.py"))],
        input=json.dumps([order.plain() for order in orders]),
        capture_output=True,
        text=True,
        timeout=SECONDS * len(orders),
        env=environment,
    )
    if run.returncode:
        raise KernelError(f"the compiler refuses a kernel:\n{run.stderr[-4000:]}")
    found = json.loads(run.stdout.splitlines()[-1])
    return [
        Compiled(arch=order.arch, warps=order.warps, **each)
        for order, each in zip(orders, found, strict=True)
    ]
