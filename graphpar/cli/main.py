"""``graphpar``: the parser of the command line, and what each outcome prints and exits with.

Exit codes: 0 done; 1 ``verify`` found a difference; 2 something the user can mend; 70 a fault of
graphpar; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module, metadata

from graphpar.cli.output import Terminal, describe, shown_warnings
from graphpar.collector import collector_paused
from graphpar.errors import GraphparError

COMMANDS = ("dump", "plan", "verify", "codegen", "demo")
MEND, FAULT, INTERRUPTED, BROKEN_PIPE = 2, 70, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    atexit.register(gc.freeze)  # at its end Python looks for garbage among all objects: seconds
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # the dump has "×" and "…"
    given = sys.argv[1:] if argv is None else argv
    parser = make_parser(given[0] if given else "")
    try:
        options = parser.parse_args(argv)
        if options.run is None:
            parser.error("a command is needed")
    except SystemExit as stop:
        return int(stop.code or 0)
    return guarded(options.run, options)


def make_parser(command: str) -> argparse.ArgumentParser:
    """The parser of ``command``, whose module alone is imported; of all of them if it is none."""
    parser = argparse.ArgumentParser(
        prog="graphpar",
        description="Tensor and sequence parallelism for unmodified PyTorch models.",
        epilog="exit codes: 0 done, 1 not equivalent (verify), 2 something you can mend, "
        "70 a fault of graphpar",
    )
    parser.add_argument("--version", action="version", version=f"graphpar {version()}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in (command,) if command in COMMANDS else COMMANDS:
        with collector_paused():
            module = import_module(f"graphpar.cli.{name}")
        module.add_parser(commands).add_argument(
            "--traceback", action="store_true", help="print the traceback of an error"
        )
    return parser


def version() -> str:
    try:
        return metadata.version("graphpar")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def guarded(run: Callable[[argparse.Namespace, Terminal], int], options: argparse.Namespace) -> int:
    """Run a command; errors become a message and an exit code."""
    terminal = Terminal()
    try:
        with shown_warnings(terminal):
            code = run(options, terminal)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        terminal.say("interrupted")
        return INTERRUPTED
    except GraphparError as error:
        _print_traceback(error, options)
        terminal.say(describe(error))
        return MEND
    except Exception as error:
        _print_traceback(error, options)
        terminal.say(f"internal fault: {type(error).__name__}: {describe(error)}")
        rest = "" if options.traceback else "; --traceback gives the rest"
        terminal.say(f"This is a fault of graphpar: please report it with these lines{rest}.")
        return FAULT


def _print_traceback(error: Exception, options: argparse.Namespace) -> None:
    if options.traceback:
        traceback.print_exception(error)


def _discard_output() -> None:
    """Let the interpreter's last flush of stdout go nowhere, instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
