"""Attributes of torch that are replaced while a model is exported, for the exporting thread."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

Patch = tuple[Any, str, Callable[..., Any]]
"""An owner, the name of its function, and what to call in place of that."""

_EXPORTING = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within, no other thread is: torch.export keeps state of the whole process, and so do patches
    that begin and end in another order."""
    with _EXPORTING:
        yield


def here(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` for this thread, ``original`` for every other, which may train meanwhile."""
    owner = threading.get_ident()

    @wraps(replacement)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = replacement if threading.get_ident() == owner else original
        return chosen(*args, **kwargs)

    return call


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Within, this thread sees the replacements: of an owner's function, or of a builtin one."""
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            create = not hasattr(owner, name)
            original = getattr(builtins if create else owner, name)
            made = here(original, replacement)
            stack.enter_context(mock.patch.object(owner, name, made, create=create))
        yield
