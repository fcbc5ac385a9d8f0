"""Where a node comes from: the user's source line, the module, and the pass that made it."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OUR_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program; ``module`` is the path of the module that ran it."""

    file: str
    line: int
    module: str = ""

    @property
    def text(self) -> str:
        """The source line itself, without indentation; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.text}"


UNKNOWN = Source("<unknown>", 0)


@cache
def _innermost_user_frame(stack_trace: str) -> tuple[str, int]:
    frames = [(m["file"], int(m["line"])) for m in _FRAME.finditer(stack_trace)]
    for file, line in reversed(frames):
        if not file.startswith(_OUR_ROOTS):
            return file, line
    return frames[-1] if frames else (UNKNOWN.file, UNKNOWN.line)


def source_of(stack_trace: str | None, module: str = "") -> Source:
    """The innermost frame of ``stack_trace`` that is outside torch and graphpar."""
    return Source(*_innermost_user_frame(stack_trace or ""), module)
