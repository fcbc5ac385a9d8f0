import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphpar.cli.main import main

MODELS = Path(__file__).with_name("models.py")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


def at(line: str) -> str:
    """How an error names a line of models.py."""
    number = [text.strip() for text in MODELS.read_text().splitlines()].index(line) + 1
    return f"  at models.py:{number}: {line}"


@pytest.fixture
def graphpar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command line in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a model adds to it

    def run(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return run
