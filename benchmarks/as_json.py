"""The tables of benchmark results as JSON, for programs to compare.

    python benchmarks/as_json.py [NAME ...] > results.json

By default of all results. Each table is a list of rows, by the names of their columns; a cell that
is a number is one, whatever its unit ("4.2 ms" stays text).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from _common import RESULTS

Row = dict[str, float | str]


def cell(text: str) -> float | str:
    """The number that the cell is, if it is one; emphasis is no part of it."""
    plain = text.strip().strip("*")
    try:
        return float(plain)
    except ValueError:
        return plain


def tables(text: str) -> Iterator[list[Row]]:
    """The tables of a markdown text, as :func:`_common.table` writes them."""
    head: list[str] = []
    rows: list[Row] = []
    for line in [*text.splitlines(), ""]:
        if not line.startswith("|"):
            if head:
                yield rows
            head, rows = [], []
            continue
        cells = line.strip("|").split(" | ")
        if not head:
            head = [each.strip() for each in cells]
        elif not all(set(each.strip()) <= set("-:") for each in cells):
            rows.append(dict(zip(head, map(cell, cells), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names or sorted(path.stem for path in RESULTS.glob("*.md"))
    found = {name: list(tables((RESULTS / f"{name}.md").read_text())) for name in names}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
