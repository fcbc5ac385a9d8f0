"""A program with a bit of everything, at each stage, for the tests of the verifier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpar.cost import CostModel
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import (
    Program,
    copy_program,
)
from graphpar.trace import bind, trace
from tests.golden.models import dropping_layers

aten = torch.ops.aten
CONVERT = torch.ops.graphpar.convert.default
HERE = Path(__file__).name
# Gathers cost more than all else, so that the mean is taken of shards.
SLOW_LINKS = CostModel(latency_us=0, link_bytes_per_us=0.001)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Equal layers, a buffer that is written to, a constant, dropout, views, a sharded mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.statistics = nn.BatchNorm1d(4)
        self.head, self.pool = nn.Linear(8, 16), nn.Linear(8, 512)
        self.dropout = nn.Dropout(0.5)
        self.offset = torch.arange(8.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x + self.offset
        for layer in self.layers:
            x = layer(x)
        x = self.statistics(x)
        y = self.dropout(torch.relu(self.head(x)))
        a, b = y.view(2, 4, 2, 8).split(4, -1)
        return a * b, torch.relu(self.pool(x)).mean(-1)


@functools.cache
def stages() -> dict[str, Program]:
    torch.manual_seed(0)
    steps = default_pipeline(tp=2, sp=True, cost=SLOW_LINKS, rng="exact")
    return run_pipeline(trace(Model(), *bind(Model(), (torch.randn(2, 4, 8),), None)), steps)


@functools.cache
def seeded() -> Program:
    """Layers that drop, with masks that follow from a seed."""
    torch.manual_seed(0)
    model, x = dropping_layers()
    steps = default_pipeline(tp=2, sp=True, overlap=False)
    return list(run_pipeline(trace(model, *bind(model, (x,), None)), steps).values())[-1]


def local() -> Program:
    return copy_program(stages()["localize"])


def typed() -> Program:
    return copy_program(stages()["fuse-biases"])


def nodes(program: Program) -> list[fx.Node]:
    return [node for _, graph in program.graphs() for node in graph.nodes]


def first(program: Program, wanted: Callable[[fx.Node], object]) -> fx.Node:
    return next(node for node in nodes(program) if wanted(node))


def of(program: Program, target: Any) -> fx.Node:
    return first(program, lambda n: n.target is target)
