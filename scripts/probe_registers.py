"""Find how many non-zeros a thread of the fast kernels can keep in registers, and write the table.

    python scripts/probe_registers.py [FILTER ...]

Compiles each kind of kernel with more and with fewer words for all architectures, without a GPU,
until the most are known that pass the static checks; writes codegen/sparse_rnn/register_words.py.
Half a day on one core. FILTERs, such as "forward bf16" or "lstm", probe only the
entries that have all the words of one; the others keep what the table says.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from tempfile import TemporaryDirectory

from graphpar.codegen.sparse_rnn.cells import cell_of
from graphpar.codegen.sparse_rnn.compile import compile_all, fast_order
from graphpar.codegen.sparse_rnn.devices import DEVICES
from graphpar.codegen.sparse_rnn.emit import write
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import for_triton
from graphpar.codegen.sparse_rnn.limits import CELLS, PROBED_SLOTS, WARPS
from graphpar.codegen.sparse_rnn.register_words import REGISTER_WORDS
from graphpar.codegen.sparse_rnn.static_checks import check

TABLE = Path(__file__).parents[1] / "codegen/sparse_rnn/register_words.py"
EXCHANGED = 4352  # more than a word with its column is read whole for
BATCHES = 2, 4, 8
STEP = {8: 8, 16: 4}
AT_ONCE = 4  # kernels a process compiles
HEAD = '''"""Words that stay in registers: the table that ``scripts/probe_registers.py`` writes.

By part, type of value, warps, whether frugal, and cell: the most non-zeros of a thread in launches
of up to 2, 4 and 8 batch columns with which the kernel passes the static checks on
{archs}.
"""

REGISTER_WORDS: dict[tuple[str, str, int, bool, str], tuple[int, int, int]] = '''


@dataclass
class Entry:
    """``good`` words fit the first architecture, ``bad`` do not fit one; ``checked`` further
    architectures take ``good``, too. The first guess is the table's."""

    key: tuple[str, str, int, bool, str]
    place: int
    guess: int
    good: int = 0
    bad: int = 0
    checked: int = 0

    @property
    def step(self) -> int:
        return STEP[self.key[2]] // (2 if self.key[1] == "fp32" else 1)

    @property
    def found(self) -> bool:
        return 0 < self.bad <= self.good + self.step

    @property
    def done(self) -> bool:
        return self.found and (not self.good or self.checked == len(DEVICES) - 1)

    @property
    def arch(self) -> str:
        """Where :meth:`next` is to be tried."""
        return tuple(DEVICES)[self.checked + 1 if self.found else 0]

    def next(self) -> int:
        if self.found:
            return self.good
        if not self.good and not self.bad:
            return max(self.guess // self.step, 1) * self.step
        if not self.bad:
            return self.good + self.step
        if not self.good and self.bad > 4 * self.step:
            return self.bad - 2 * self.step
        return (self.good + self.bad) // (2 * self.step) * self.step

    def note(self, words: int, fine: bool) -> None:
        if self.found and fine:
            self.checked += 1
        elif self.found:
            self.good, self.bad, self.checked = words - self.step, words, 0
        elif fine:
            self.good = words
        else:
            self.bad = words

    def spec(self, words: int) -> FastSpec:
        part, value, warps, frugal, cell = self.key
        name = "rnn_tanh" if cell == "rnn" else cell
        gates = cell_of(name).gates if part == "backward" else 1
        return FastSpec(
            part=part, cell_name=name, hidden=-(-EXCHANGED // (64 * gates)) * 64,
            batch=BATCHES[self.place], programs=80, value=value, warps=warps, frugal=frugal,
            register_words=words, shared_words=16, segments=2, rows=PROBED_SLOTS[0],
            slots=PROBED_SLOTS[1], save=True,
        )  # fmt: skip


def fits(pairs: list[tuple[Entry, int]], arch: str, folder: Path) -> list[bool]:
    """Whether each entry's kernel of so many words passes the static checks."""
    if not pairs:
        return []
    specs = [for_triton(entry.spec(words)) for entry, words in pairs]
    orders = [fast_order(s, write(emit_fast(s), folder), arch=arch) for s in specs]
    faults = [check(s, c).faults for s, c in zip(specs, compile_all(orders), strict=True)]
    return [not any(f for f in each if "not resident" not in f) for each in faults]


def save(table: dict[tuple[str, str, int, bool, str], tuple[int, int, int]]) -> None:
    archs = ", ".join(DEVICES)
    text = pformat(table, width=90, sort_dicts=False).replace("'", '"')
    TABLE.write_text(HEAD.format(archs=archs) + "{\n " + text[1:-1] + ",\n}\n")


def main() -> None:
    filters = [each.split() for each in sys.argv[1:]] or [[]]
    table = dict(REGISTER_WORDS)
    entries = []
    for part in ("forward", "backward"):
        for value in ("bf16", "fp16", "fp32"):
            for warps in WARPS:
                for frugal in (False, True) if warps == min(WARPS) else (False,):
                    for cell in CELLS:
                        key = (part, value, warps, frugal, cell)
                        words = [part, value, str(warps), cell, "frugal" if frugal else "normal"]
                        known = table.setdefault(key, (0, 0, 0))
                        for place, batch in enumerate(BATCHES):
                            named = {*words, f"batch{batch}"}
                            if any(set(each) <= named for each in filters):
                                entries.append(Entry(key, place, known[place]))
    while batch := [entry for entry in entries if not entry.done][:AT_ONCE]:
        with TemporaryDirectory() as folder:
            for arch in DEVICES:
                given = [entry for entry in batch if entry.arch == arch]
                pairs = [(entry, entry.next()) for entry in given]
                for (entry, words), fine in zip(
                    pairs, fits(pairs, arch, Path(folder)), strict=True
                ):
                    entry.note(words, fine)
                    verdict = "fits" if fine else "no"
                    print(*entry.key, BATCHES[entry.place], words, arch, verdict, flush=True)
                    if entry.done:
                        row = list(table[entry.key])
                        row[entry.place] = entry.good
                        table[entry.key] = (row[0], row[1], row[2])
                        save(table)


if __name__ == "__main__":
    main()
