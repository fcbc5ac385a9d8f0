"""Launch generated kernels on a GPU, if it can run all their blocks at once.

A block that waits for one that never started would wait forever, so this is checked before each
first launch, and the launch itself is cooperative: the driver refuses a grid that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from graphpar.codegen.sparse_rnn.devices import DEVICES, REGISTERS, Device, resident_blocks
from graphpar.codegen.sparse_rnn.emit import load, write
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.errors import GraphparError, KernelError, UnsupportedError

LEAST_CAPABILITY = 8, 0
LEAST_TRITON = 3, 6
GATHERS = 3, 7
"""The first version whose Gluon gathers from shared memory; before, kernels do so by PTX."""


def check_device(
    programs: int, *, multiprocessors: int, capability: tuple[int, int], triton: tuple[int, int]
) -> None:
    """Whether a GPU can run ``programs`` blocks at once, one on each multiprocessor.

    Raises:
        UnsupportedError: says what would run.
    """
    if capability < LEAST_CAPABILITY:
        raise UnsupportedError(
            f"compute capability {_dotted(capability)}: the kernels need 8.0 or newer"
        )
    if triton < LEAST_TRITON:
        raise UnsupportedError(f"triton {_dotted(triton)}: the fast kernels need 3.6 or newer")
    if programs > multiprocessors:
        raise UnsupportedError(
            f"{programs} blocks cannot run at once on {multiprocessors} multiprocessors: plan for "
            f"{multiprocessors} blocks or fewer"
        )


def check_resident(
    spec: FastSpec,
    *,
    registers: int,
    shared_bytes: int,
    multiprocessors: int,
    registers_each: int,
    shared_each: int,
) -> None:
    """Whether a GPU can hold all blocks of a compiled kernel at once.

    Args:
        registers: of a thread. shared_bytes: of a block. registers_each, shared_each: of a
            multiprocessor.

    Raises:
        UnsupportedError: says what would run.
    """
    blocks = resident_blocks(
        warps=spec.warps,
        registers=registers,
        shared_bytes=shared_bytes,
        registers_each=registers_each,
        shared_each=shared_each,
    )
    if blocks * multiprocessors >= spec.programs:
        return
    if shared_bytes > shared_each:
        over = -(-(shared_bytes - shared_each) // (4 * spec.threads))
        raise UnsupportedError(
            f"a block takes {shared_bytes:,} bytes of shared memory, a multiprocessor has "
            f"{shared_each:,}: {over} words less per thread would fit, or a smaller batch"
        )
    if not blocks:
        raise UnsupportedError(
            f"a block of {spec.threads} threads takes {registers} registers each, a "
            f"multiprocessor has {registers_each:,}: {registers_each // spec.threads} would fit"
        )
    raise UnsupportedError(
        f"{spec.programs} blocks cannot run at once: {multiprocessors} multiprocessors hold "
        f"{blocks} each: plan for {blocks * multiprocessors} blocks or fewer"
    )


def triton_version() -> tuple[int, int]:
    """The installed version.

    Raises:
        UnsupportedError: there is none.
    """
    try:
        import triton
    except ImportError:
        raise UnsupportedError(
            "triton is not installed: the recurrence runs by the library's products only"
        ) from None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def for_triton(spec: FastSpec) -> FastSpec:
    """The kernel of ``spec`` that the installed triton compiles."""
    try:
        return replace(spec, inline=triton_version() < GATHERS)
    except UnsupportedError:  # its text can be read all the same
        return spec


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@dataclass(slots=True)
class FastLauncher:
    """A :data:`graphpar.codegen.sparse_rnn.fast_part.Launch` on the GPU that holds the tensors.

    ``folder`` is for the generated files.
    """

    folder: Path | None = None
    _kernels: dict[tuple[FastSpec, torch.device], Any] = field(default_factory=dict)

    def __call__(self, spec: FastSpec, programs: int, arguments: Mapping[str, Any]) -> None:
        device = arguments["exchange_ptr"].device
        if device.type != "cuda":
            raise KernelError(f"the fast kernels run on a GPU, the tensors are on {device}")
        with torch.cuda.device(device):
            kernel = self._kernels.get((spec, device))
            if kernel is not None:
                kernel[(programs,)](**arguments, **_options(spec))
                return
            try:
                kernel = self._ready(spec, programs, arguments)
                kernel[(programs,)](**arguments, **_options(spec))
            except GraphparError:
                raise
            except Exception as error:  # of the compiler or the driver, which have many
                raise UnsupportedError(
                    f"triton {_dotted(triton_version())} or the driver refuses the kernel: {error}"
                ) from error
            self._kernels[spec, device] = kernel

    def _ready(self, spec: FastSpec, programs: int, arguments: Mapping[str, Any]) -> Any:
        """The kernel, compiled and known to fit."""
        properties: Any = torch.cuda.get_device_properties()
        check_device(
            programs,
            multiprocessors=properties.multi_processor_count,
            capability=(properties.major, properties.minor),
            triton=triton_version(),
        )
        kernel = getattr(load(write(emit_fast(for_triton(spec)), self.folder)), spec.part)
        compiled = kernel.run(**arguments, **_options(spec), grid=(programs,), warmup=True)
        sizes = {
            "multiprocessors": properties.multi_processor_count,
            "registers_each": properties.regs_per_multiprocessor,
            "shared_each": properties.shared_memory_per_block_optin,
        }
        shared = compiled.metadata.shared
        check_resident(spec, registers=0, shared_bytes=shared, **sizes)  # or it does not load
        _ = compiled.run  # loads it
        check_resident(spec, registers=compiled.n_regs, shared_bytes=shared, **sizes)
        return kernel


def planned_device(device: torch.device) -> Device:
    """What the planner takes a GPU for.

    Raises:
        UnsupportedError: the kernels do not run on it, or not with this triton.
    """
    found: Any = torch.cuda.get_device_properties(device)
    check_device(
        0,
        multiprocessors=found.multi_processor_count,
        capability=(found.major, found.minor),
        triton=triton_version(),
    )
    return described(found)


def described(found: Any) -> Device:
    """The known device that is nearest to torch's properties of a GPU, with its sizes."""
    number = 10 * found.major + found.minor
    near = [each for each in DEVICES.values() if each.capability <= number]
    return replace(
        max(near, key=lambda each: each.capability),
        name=found.name,
        multiprocessors=found.multi_processor_count,
        registers=found.regs_per_multiprocessor,
        shared_bytes=found.shared_memory_per_block_optin,
    )


def _options(spec: FastSpec) -> dict[str, Any]:
    return {
        "SPIN": True,
        "num_warps": spec.warps,
        "maxnreg": min(255, REGISTERS // spec.threads),
        "launch_cooperative_grid": True,
    }
