"""What the planner knows of devices: data-sheet figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpar.errors import InputError

WARP = 32
REGISTERS = 65536
"""32-bit registers of a multiprocessor, of all architectures here."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Rates are per microsecond.

    Attributes:
        multiprocessors: blocks that run at once, one on each.
        registers: 32-bit registers of a multiprocessor.
        shared_bytes: shared memory that one block may use.
        l2_bytes: of the second-level cache.
    """

    arch: str
    name: str
    multiprocessors: int
    clocks_per_us: float
    l2_bytes: int
    l2_bytes_per_us: float
    memory_bytes_per_us: float
    shared_bytes: int
    registers: int = REGISTERS

    @property
    def capability(self) -> int:
        """90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))


DEVICES: Mapping[str, Device] = {
    device.arch: device
    for device in (
        Device("sm_80", "A100", 108, 1410, 40 << 20, 4.0e6, 2.0e6, 163 << 10),
        Device("sm_90", "H200", 132, 1755, 50 << 20, 5.5e6, 4.8e6, 227 << 10),
        Device("sm_100", "B200", 148, 1850, 126 << 20, 9.0e6, 8.0e6, 227 << 10),
    )
}


_REGISTER_UNIT = 256  # registers are given to warps in units
_MOST_THREADS = 2048


def resident_blocks(
    *, warps: int, registers: int, shared_bytes: int, registers_each: int, shared_each: int
) -> int:
    """Blocks that one multiprocessor can hold at once.

    Args:
        registers: of a thread. registers_each, shared_each: of the multiprocessor.
    """
    warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = registers_each // max(1, warp * warps)
    return min(by_registers, shared_each // max(1, shared_bytes), _MOST_THREADS // (warps * WARP))


def device_of(arch: str) -> Device:
    """A device by its architecture.

    Raises:
        InputError: an unknown one.
    """
    if arch not in DEVICES:
        raise InputError(f"no device has the architecture {arch!r}; known: {', '.join(DEVICES)}")
    return DEVICES[arch]
