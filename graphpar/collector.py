"""collector: work that makes objects which stay, without looking for garbage meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, Python looks for no cycles: imports and tracing make many objects, nearly all of
    which stay, and the collector would walk them again and again (a third of the time)."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
