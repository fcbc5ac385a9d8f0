"""What autograd keeps between forward and backward: predicted of a program, measured of a run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.cost.dry_run import GraphRun
from graphpar.program import info


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Memory that autograd keeps ``count`` times, ``nbytes`` each.

    ``maker`` is the node that makes it (``None``: an input of the program), ``keepers`` the nodes
    that keep it, ``block`` the block they stand in (``""``: the root).
    """

    nbytes: int
    count: int
    block: str
    maker: fx.Node | None
    keepers: tuple[fx.Node, ...]

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count > 1 else ""
        name = "input" if self.maker is None else self.maker.name
        kept = ", ".join(node.name for node in self.keepers)
        where = f"  {info(self.maker).source}" if self.maker is not None else ""
        return f"{self.nbytes} B{times}: {name}, kept for {kept}{where}"


def saved_tensors(run: GraphRun) -> list[SavedTensor]:
    """Everything that the run of a root keeps, equal calls of a block folded.

    The sum of ``nbytes * count`` is ``run.saved_bytes``.
    """
    found = list(_of_graph(run, "", run.saved))
    blocks: dict[int, tuple[GraphRun, str, int]] = {}
    for step in run.steps:
        if step.block is not None:
            _, name, count = blocks.get(id(step.block), (None, str(step.node.target), 0))
            blocks[id(step.block)] = step.block, name, count + 1
    for block, name, count in blocks.values():
        inner = block.saved - set(block.inputs) - set(block.outputs)
        found += [replace(each, count=count) for each in _of_graph(block, name, inner)]
    return _folded(found, {step.node: id(step.block) for step in run.steps if step.block})


def _of_graph(run: GraphRun, block: str, kept: Iterable[int | None]) -> Iterator[SavedTensor]:
    keepers: dict[int, dict[fx.Node, None]] = {}
    for step in run.steps:
        for number in step.saves:
            keepers.setdefault(number, {})[step.node] = None
    for number in sorted(n for n in kept if n is not None):
        storage = run.storages[number]
        yield SavedTensor(
            nbytes=storage.nbytes,
            count=1,
            block=block,
            maker=storage.maker,
            keepers=tuple(keepers[number]),
        )


def _folded(found: Iterable[SavedTensor], blocks: Mapping[fx.Node, int]) -> list[SavedTensor]:
    """Entries that equal layers make and keep alike, as one with the sum of their counts."""

    def kind(node: fx.Node | None) -> Any:
        return node and (blocks.get(node) or (node.target, info(node).source.line))

    rows: dict[Any, SavedTensor] = {}
    for each in found:
        key: Any = kind(each.maker), each.block, each.nbytes, tuple(map(kind, each.keepers))
        if each.block:
            key = id(each.maker), *key
        rows[key] = replace(each, count=each.count + (rows[key].count if key in rows else 0))
    return list(rows.values())


class _Held:
    """What autograd holds in place of a tensor that it saves."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """A context that sees what autograd saves in it. ``resident`` tensors do not count.

    with SavedTensors(model.parameters()) as saved:
        loss = model(x)
    saved.nbytes  # of storages, each once, while ``loss`` lives
    """

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        self._resident = list(resident)
        self._held: list[weakref.ref[_Held]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._pack,
            lambda held: held.tensor,
        )

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor)
        self._held.append(weakref.ref(held))
        return held

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def nbytes(self) -> int:
        """The bytes of all storages that are kept now."""
        left_out = {x.untyped_storage()._cdata for x in self._resident}
        kept = [found.tensor for ref in self._held if (found := ref()) is not None]
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in kept}
        return sum(s.nbytes() for address, s in storages.items() if address not in left_out)
