"""What the benchmarks share: the machine in words, tables, result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """The processor, its number of cores and the versions that count."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.split(":", 1)[1] for x in info.read_text().splitlines() if "model name" in x]
        model = names[0].strip() if names else model
    return (
        f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    marks = ["---", *("--:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, marks, *rows))


def write_json(path: Path | None, figures: object) -> None:
    """Keep a benchmark's numbers for another program to read, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


def report(name: str, title: str, body: str) -> None:
    """Print a result and keep it in results/``name``.md."""
    today = datetime.datetime.now(datetime.UTC).date()
    text = f"# {title}\n\n{today}. {machine()}.\n\n{body.strip()}\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
