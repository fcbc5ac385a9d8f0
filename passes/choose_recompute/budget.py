"""Bytes as people write them."""

from __future__ import annotations

import re

from graphpar.errors import InputError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
BINARY = ("B", *(f"{p}iB" for p in "KMGT"))
_UNITS |= {unit: 1024**i for i, unit in enumerate(BINARY)}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*")


def parse_bytes(value: int | str) -> int:
    """A number of bytes from an int or a text such as ``"40GiB"`` or ``"1.5 GB"``.

    Raises:
        InputError: it is neither, or not positive.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InputError(f"memory_budget must be bytes or a text such as '40GiB', not {value!r}")
    if isinstance(value, int):
        found = value
    else:
        match = _FORM.fullmatch(value)
        if match is None or match[2] not in _UNITS:
            units = ", ".join(filter(None, _UNITS))
            raise InputError(f"cannot read {value!r} as bytes: a number and one of {units}")
        found = int(float(match[1]) * _UNITS[match[2]])
    if found <= 0:
        raise InputError(f"memory_budget must be positive, not {value!r}")
    return found


def format_bytes(nbytes: int) -> str:
    """``1234567`` → ``1.18 MiB``; below 10 KiB in bytes."""
    if nbytes < 10240:
        return f"{nbytes} B"
    power = min(nbytes.bit_length() // 10, len(BINARY) - 1)
    return f"{nbytes / 1024**power:.2f} {BINARY[power]}"
