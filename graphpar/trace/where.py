"""The user's line, for errors raised while tracing."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn

from graphpar.errors import TraceError
from graphpar.provenance import UNKNOWN, Source

LIBRARY_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")
"""How names of files begin that are not the user's: torch's, ours, generated code's."""

_STANDARD_LIBRARY = Path(traceback.__file__).parent


def trace_error(message: str, source: Source | None) -> TraceError:
    """A :class:`TraceError` that carries the user's line as a note."""
    error = TraceError(message)
    if source is not None and source.line:
        error.add_note(f"  at {source}")
    return error


_TYPED_IN = ("<stdin>", "<string>")
"""Code of a prompt or of ``exec``; generated methods (of dataclasses) have these names too."""


@cache
def is_users(file: str) -> bool:
    """Whether a file is outside torch, graphpar, generated code and the standard library."""
    folder = Path(file).parent
    package = folder.parent if folder.name not in ("site-packages", "dist-packages") else folder
    return not file.startswith(LIBRARY_ROOTS) and _STANDARD_LIBRARY not in (folder, package)


def user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost of ``frames`` that is the user's: in a file, or else typed in."""
    users = [f for f in frames if is_users(f.filename)]
    users = users or [f for f in frames if f.filename in _TYPED_IN]
    return users[-1] if users else None


def user_line(frames: Sequence[traceback.FrameSummary]) -> Source | None:
    """The line of :func:`user_frame`."""
    frame = user_frame(frames)
    return frame and Source(frame.filename, frame.lineno or 0)


def forward_line(model: nn.Module) -> Source:
    """Where the model's forward begins: the source of its inputs and of its output."""
    forward = inspect.unwrap(model.forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return UNKNOWN
    first = code.co_firstlineno  # of the first decorator
    lines = [linecache.getline(code.co_filename, first + i).lstrip() for i in range(20)]
    skipped = next((i for i, line in enumerate(lines) if line.startswith("def ")), 0)
    return Source(code.co_filename, first + skipped)
