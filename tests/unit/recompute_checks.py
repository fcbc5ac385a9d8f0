"""A training step of one rank's program in this process, and what recomputation must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from graphpar.container import Container, place
from graphpar.cost import SavedTensors, dry_run
from graphpar.program import Program
from graphpar.runtime import compile_program, select
from graphpar.types import Shard, cut
from graphpar.verify import verify
from tests import zoo


class Collectives(TorchDispatchMode):
    """Counts functional collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.found.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One training step of rank 0's program."""

    saved_bytes: int
    values: list[Tensor]
    flops: int
    collectives: list[str]


@contextmanager
def one_of(ranks: int) -> Iterator[str]:
    """This process as rank 0 of a group whose collectives send nothing; its name."""
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks)
    try:
        world = torch.distributed.group.WORLD
        assert world is not None
        yield world.group_name
    finally:
        torch.distributed.destroy_process_group()


def train(program: Program, state: dict[str, Tensor], leaves: list[Any]) -> Trained:
    root = Container()
    for name, known in program.state.items():
        if known.kind == "constant":
            continue
        value = state[name].detach().clone()
        if isinstance(known.type, Shard):
            value = cut(value, known.type, 0, program.ranks).clone()
        if known.kind == "parameter" and known.spec.differentiable:
            value = torch.nn.Parameter(value)
        for alias in known.names:
            place(root, alias, value)
    resident = [*root.parameters(), *root.buffers(), *program.constants.values()]
    with one_of(program.ranks) as group, FlopCounterMode(display=False) as flops:
        forward = compile_program(program, group)
        torch.manual_seed(1)
        with SavedTensors(resident) as saved, Collectives() as collectives:
            results = forward(root, *select(leaves, program))
            saved_bytes = saved.nbytes
            zoo.loss_of(results).backward()
    gradients = [p.grad for p in root.parameters() if p.grad is not None]
    return Trained(
        saved_bytes=saved_bytes,
        values=[*(x.detach() for x in results if isinstance(x, Tensor)), *gradients],
        flops=flops.get_total_flops(),
        collectives=collectives.found,
    )


def check(program: Program, plain: Trained, state: Any, leaves: Any) -> Trained:
    """The program with regions: equal to the plain run, and in all counts as predicted."""
    verify(program)
    run = dry_run(program)
    found = train(program, state, leaves)
    assert found.saved_bytes == run.saved_bytes
    assert len(found.values) == len(plain.values)
    assert all(map(torch.equal, found.values, plain.values))
    replayed = sum(k.flops for k in run.replayed if "attention" not in k.op)
    assert found.flops - plain.flops == replayed
    again = sum(bool(k.collective) for k in run.replayed)
    assert len(found.collectives) - len(plain.collectives) == again
    return found
