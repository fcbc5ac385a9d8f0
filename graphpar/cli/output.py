"""What commands print: results on stdout, everything else on stderr, colour on terminals only."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from graphpar.errors import GraphparWarning


class Terminal:
    """The two streams of a command."""

    def __init__(self) -> None:
        self.out = Console(soft_wrap=True)
        self.err = Console(stderr=True, soft_wrap=True)

    def write(self, text: str) -> None:
        """Plain text to stdout."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def write_code(self, text: str, language: str) -> None:
        """Code to stdout, in colours on a terminal; the text is the same."""
        if not self.out.is_terminal:
            self.write(text)
            return
        syntax = Syntax("", language, theme="ansi_dark", background_color="default")
        self.out.print(syntax.highlight(text), end="")

    def say(self, text: str) -> None:
        """A line for people, to stderr."""
        self.err.print(text, markup=False, highlight=False, emoji=False)


def describe(error: BaseException) -> str:
    """The message of an error and its notes, each once: the source line, the step."""
    lines = str(error).splitlines() or [type(error).__name__]
    for note in getattr(error, "__notes__", ()):
        lines += [f"  {line.strip()}" for line in note.splitlines()]
    return "\n".join(dict.fromkeys(lines))


@contextmanager
def shown_warnings(terminal: Terminal) -> Iterator[None]:
    """Within, each :class:`GraphparWarning` is printed once; other warnings are as always."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", GraphparWarning)
        default = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, GraphparWarning):
                default(message, category, *place, **more)
            elif str(message) not in seen:
                seen.add(str(message))
                terminal.say(f"warning: {message}")

        warnings.showwarning = show
        yield


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Left-aligned columns, two blanks apart; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)
