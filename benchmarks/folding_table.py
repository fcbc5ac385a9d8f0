"""Which layers of every model of the zoo are traced once, and why others are not.

    python benchmarks/folding_table.py [--layers 4] [--static] [NAME ...]

"calls" are calls of layers that others look like; of these "traced" ran op by op, and "folded" did
not: they did what one before had done. "ops" is the share of their ops that were not traced.
"same" says that the program is that of tracing every layer, before outline and after it (structural
hash). CPU seconds of both ways, export and lowering, unless ``--static``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from pathlib import Path

from _common import report, table, write_json

from graphpar.errors import GraphparWarning
from graphpar.passes.outline import outline
from graphpar.program import Program, program_hash
from graphpar.trace import trace
from graphpar.trace.report import LayerTrace
from tests import zoo


def reason_of(layer: LayerTrace) -> str:
    """In a few words, without the line."""
    text = layer.reason or ("first of its kind" if not layer.shared else "")
    before, at, rest = text.partition(" at ")
    return before + (" " + rest.rpartition(" is not ")[2].join(("is not ", "")) if at else "")


def traced(name: str, layers: int, mode: str) -> tuple[Program, float]:
    """The program, and CPU seconds."""
    model, kwargs = zoo.build(name, layers=layers)
    start = time.process_time()
    program = trace(model, (), kwargs, mode=mode)
    return program, time.process_time() - start


def row(name: str, layers: int, static: bool) -> list[str]:
    once, fast = traced(name, layers, "once")
    flat, slow = traced(name, layers, "flat")
    found = once.report["trace"]
    hashes = [[program_hash(p) for p in (each, outline(each))] for each in (flat, once)]
    calls, folded = found.layers, found.folded
    ops = sum(each.ops for each in calls)
    reasons = Counter(reason_of(each) for each in calls if not each.folded)
    return [
        name,
        str(len(calls)),
        str(len(calls) - len(folded)),
        str(len(folded)),
        f"{sum(each.shared for each in calls) / ops:.0%}" if ops else "–",
        "yes" if hashes[0] == hashes[1] else "**no**",
        *([] if static else [f"{slow:.2f}", f"{fast:.2f}"]),
        found.flat or "; ".join(f"{n} × {why}" for why, n in reasons.items()) or "–",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--static", action="store_true", help="without seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    options = parser.parse_args()
    warnings.simplefilter("ignore", GraphparWarning)
    names = options.names or [*zoo.BUILDERS, *zoo.MORE]
    traced(names[0], 1, "flat")  # what the first trace alone pays for
    rows = []
    for name in names:
        rows.append(row(name, options.layers, options.static))
        print(" | ".join(rows[-1]), flush=True)
    seconds = [] if options.static else ["flat, CPU s", "once, CPU s"]
    head = ["model", "calls", "traced", "folded", "ops", "same", *seconds, "why traced"]
    write_json(options.json, [dict(zip(head, each, strict=True)) for each in rows])
    report(
        "folding_table" if not options.names else "folding_part",
        f"Layers traced once, {options.layers} of each model",
        table(head, rows),
    )


if __name__ == "__main__":
    main()
