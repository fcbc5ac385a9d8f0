"""What was traced once, and where layers that could have been the same differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class LayerTrace:
    """How one call of a layer was traced: ``shared`` of its ``ops`` were known from ``like``.

    ``reason``: the first that was another, if there was one.
    """

    path: str
    kind: str
    like: str | None = None
    shared: int = 0
    ops: int = 0
    reason: str | None = None

    @property
    def folded(self) -> bool:
        """Whether nothing of the layer had to be traced."""
        return self.ops > 0 and self.shared == self.ops

    def __str__(self) -> str:
        if not self.shared:
            return f"{self.path} ({self.kind}): {self.reason or 'traced'}"
        return f"{self.path} ({self.kind}): {self.shared} of {self.ops} ops shared; {self.reason}"


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The calls of repeated layers in order. ``flat``: why none of them was shared, if so."""

    layers: tuple[LayerTrace, ...] = ()
    flat: str | None = None
    folded: tuple[LayerTrace, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folded", tuple(each for each in self.layers if each.folded))

    def lines(self) -> Iterator[str]:
        """For people: groups of equal layers, then layers that differ from earlier ones."""
        if self.flat:
            yield f"trace: every layer by itself: {self.flat}"
        groups: dict[tuple[str, str], int] = {}
        for each in self.folded:
            key = (each.kind, str(each.like))
            groups[key] = groups.get(key, 0) + 1
        for (kind, like), count in groups.items():
            yield f"trace: {like} once for itself and {count} more {kind}"
        for each in self.layers:
            if each.reason is not None:
                yield f"trace: {each}"

    def __str__(self) -> str:
        return "\n".join(self.lines())
