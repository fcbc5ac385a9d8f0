"""The memory of one pipeline stage through a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpar.plan.schedule import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one microbatch in one chunk: ``kept`` from its forward to the end of its backward,
    ``working`` while either runs."""

    kept: int
    working: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory of a stage beside its state.

    ``in_flight`` is the most forwards through a chunk whose activations it keeps at once,
    ``kept_bytes`` and ``working_bytes`` are those at the peak. ``held_bytes`` is what is kept when
    each task starts. ``whole`` are the (chunk, microbatch) that keep all.
    """

    peak_bytes: int
    kept_bytes: int
    working_bytes: int
    in_flight: int
    held_bytes: tuple[int, ...]
    whole: frozenset[tuple[int, int]]


def usage_of(
    tasks: Sequence[Task],
    needs: Sequence[Need],
    *,
    whole: Sequence[Need] = (),
    available_bytes: int = 0,
) -> Usage:
    """The memory of a stage that runs ``tasks`` in order; ``needs`` are those of each chunk.

    With ``whole``, the needs without recomputation, a microbatch keeps all where what is in flight
    and what is still to come fits in ``available_bytes`` (Korthikanti et al. 2022, appendix C).
    """
    spare = available_bytes - _walk(tasks, needs, whole, 0).peak_bytes if whole else 0
    return _walk(tasks, needs, whole, max(spare, 0))


def _walk(
    tasks: Sequence[Task], needs: Sequence[Need], whole: Sequence[Need], spare_bytes: int
) -> Usage:
    held = peak = extra = 0
    at_peak = 0, 0
    most = 0
    kept: dict[tuple[int, int], int] = {}
    chosen: set[tuple[int, int]] = set()
    starts = []
    for task in tasks:
        key = task.chunk, task.microbatch
        need = needs[task.chunk]
        starts.append(held)
        if not task.backward:
            if whole:
                every = whole[task.chunk]
                more = every.kept - need.kept
                beyond = max(every.working - need.working, 0)
                if extra + more + beyond <= spare_bytes:
                    chosen.add(key)
                    extra += more
            need = whole[task.chunk] if key in chosen else need
            kept[key] = need.kept
            held += need.kept
            most = max(most, len(kept))
        elif key in chosen:
            need = whole[task.chunk]
        if held + need.working > peak:
            peak, at_peak = held + need.working, (held, need.working)
        if task.backward:
            held -= kept.pop(key)
            if key in chosen:
                extra -= whole[task.chunk].kept - needs[task.chunk].kept
    return Usage(
        peak_bytes=peak,
        kept_bytes=at_peak[0],
        working_bytes=at_peak[1],
        in_flight=most,
        held_bytes=tuple(starts),
        whole=frozenset(chosen),
    )
