"""Read machine code as ``nvdisasm`` prints it: instructions, and the loops among them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]*?)\s*;")
_JUMP = re.compile(r"\bBRA\b.*?`\((?P<label>\.L_\w+)\)")


@dataclass(frozen=True, slots=True)
class Code:
    """``instructions`` in order; ``loops``: (first, last) of each backward jump, largest first."""

    instructions: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    @property
    def time_loop(self) -> tuple[int, int]:
        """The loop over timesteps: the largest with a barrier, if there is one.

        A jump back from code that the compiler moved behind the kernel's end is none.
        """
        with_barrier = (
            loop
            for loop in self.loops
            if any("BAR.SYNC" in i for i in self.inside(loop)) and "EXIT" not in self.inside(loop)
        )
        return next(with_barrier, self.loops[0])

    def inside(self, loop: tuple[int, int]) -> tuple[str, ...]:
        return self.instructions[loop[0] : loop[1] + 1]

    def inner(self) -> Iterator[tuple[str, ...]]:
        """The loops within the time loop."""
        first, last = time_loop = self.time_loop
        for loop in self.loops:
            if loop != time_loop and first <= loop[0] and loop[1] <= last:
                yield self.inside(loop)


def read(sass: str) -> Code:
    """The code of one kernel."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            instructions.append(found["text"])
    loops = set()
    for place, text in enumerate(instructions):
        jump = _JUMP.search(text)
        # A jump to itself ends the code.
        if jump and labels.get(jump["label"], place) < place:
            loops.add((labels[jump["label"]], place))
    ordered = sorted(loops, key=lambda loop: loop[0] - loop[1])
    return Code(tuple(instructions), tuple(ordered))


def operation(instruction: str) -> str:
    """``LDG.E.64.STRONG.SYS`` of ``@!P0 LDG.E.64.STRONG.SYS R2, [R4.64]``."""
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]
