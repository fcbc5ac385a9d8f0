"""What a training step does on one rank, in counts that no clock disturbs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphpar
from graphpar import ParallelModule
from graphpar.cost.kernels import kernel_of
from tests import zoo

OWN = str(Path(graphpar.__file__).parent), "<graphpar "
"""Where the frames of graphpar and of the code that it generates come from."""
_INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""No functions to a reader; from Python 3.12 on most are no frames either."""
_COPIES = ("clone", "_to_copy", "copy_", "contiguous")
_SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often a ring sends each part of the tensor but a rank's own."""

Counts = dict[str, int]


@dataclass
class Half:
    """Forward or backward: ops that compute, copy or communicate (views and allocations do not);
    of these the copies; collectives by kind, and the bytes that a rank sends in a ring."""

    launched: int = 0
    copies: int = 0
    copied_bytes: int = 0
    sent_bytes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)

    def counts(self) -> Counts:
        numbers = {k: v for k, v in vars(self).items() if k != "collectives"}
        return {**numbers, **dict(sorted(self.collectives.items()))}


class Ops(TorchDispatchMode):
    """Counts into ``half``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.half = Half()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = kernel_of(func, args, kwargs or {}, result)
        if kernel is None:
            return result
        self.half.launched += 1
        if kernel.collective:
            self.half.collectives[kernel.collective] += 1
            sent = _SENT[kernel.collective] * kernel.whole_bytes * (kernel.ranks - 1)
            self.half.sent_bytes += sent // kernel.ranks
        elif func._schema.name.split("::")[1] in _COPIES:
            self.half.copies += 1
            self.half.copied_bytes += sum(
                x.nbytes for x in pytree.tree_leaves(result) if isinstance(x, Tensor)
            )
        return result


@contextmanager
def own_calls(into: list[str]) -> Iterator[None]:
    """Within, the names of graphpar's Python functions that run, in order."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OWN) and code.co_name not in _INNER:
            into.append(code.co_qualname)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def step_counts(parallel: nn.Module, kwargs: dict[str, Any]) -> dict[str, Counts]:
    """Those of a later step: the first one fills caches."""
    zoo.loss_of(parallel(**kwargs)).backward()
    found: dict[str, Counts] = {}
    calls: tuple[list[str], list[str]] = ([], [])
    with own_calls(calls[0]):
        loss = zoo.loss_of(parallel(**kwargs))
    with own_calls(calls[1]):
        loss.backward()
    with Ops() as ops:
        loss = zoo.loss_of(parallel(**kwargs))
        found["forward"] = {**ops.half.counts(), "python_calls": len(calls[0])}
        ops.half = Half()
        loss.backward()
        found["backward"] = {**ops.half.counts(), "python_calls": len(calls[1])}
    return found


def program_counts(parallel: ParallelModule) -> dict[str, Counts]:
    """Nodes of the traced program, and of each graph of the one that runs; layers traced."""
    layers = parallel.report["trace"].layers
    folded = len(parallel.report["trace"].folded)
    stages = parallel.stages
    return {
        "trace": {
            "nodes": len(stages["trace"].graph.nodes),
            "layers": len(layers),
            "layers_traced": len(layers) - folded,
        },
        "nodes": {name or "root": len(g.nodes) for name, g in parallel.program.graphs()},
    }


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """This process as rank 0 of a group whose collectives send nothing."""
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def counts_of(
    build: Callable[[], zoo.Case], ranks: int, options: dict[str, Any]
) -> dict[str, Counts]:
    """All counts of a model transformed for ``ranks``, as its first rank has them."""
    model, kwargs = build()
    with one_of(ranks):
        parallel = graphpar.transform(model, (), kwargs, tp=ranks, **options)
        return {**program_counts(parallel), **step_counts(parallel, kwargs)}
