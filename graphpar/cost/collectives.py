"""Collectives by algorithm: start-up plus steps plus bytes over a link (alpha-beta).

Rings, as NCCL runs them for what tensor parallelism sends (Thakur, Rabenseifner, Gropp 2005,
section 4): with n ranks and a whole tensor of m bytes, all-gather and reduce-scatter take n - 1
steps of m / n bytes, all-reduce twice that, all-to-all n - 1 messages of m / n² bytes. A send
between two ranks is one step of m bytes.
"""

from __future__ import annotations

from graphpar.cost.hardware import Link
from graphpar.errors import InternalError

_STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "send": 1}


def collective_us(kind: str, whole_bytes: int, ranks: int, link: Link) -> float:
    """Microseconds of one collective over a tensor whose whole value has ``whole_bytes``."""
    steps, step_bytes = _steps(kind, whole_bytes, ranks)
    if not steps:
        return 0.0
    return min(
        p.start_us + steps * (p.step_us + step_bytes / (link.bytes_per_us * p.share))
        for p in link.protocols
    )


def sent_bytes(kind: str, whole_bytes: int, ranks: int) -> float:
    """What one rank sends in it."""
    steps, step_bytes = _steps(kind, whole_bytes, ranks)
    return steps * step_bytes


def _steps(kind: str, whole_bytes: int, ranks: int) -> tuple[int, float]:
    """How many steps it takes, and the bytes of each."""
    if kind not in _STEPS:
        raise InternalError(f"no collective is named {kind!r}; known: {', '.join(_STEPS)}")
    step_bytes = whole_bytes / (1 if kind == "send" else ranks)
    if kind == "all_to_all":
        step_bytes /= ranks
    return _STEPS[kind] * (ranks - 1), step_bytes
