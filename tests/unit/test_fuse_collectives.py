"""What the pass fuses, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.cost import GraphRun, Step, dry_run
from graphpar.errors import VerifyError
from graphpar.passes.fuse_collectives import fuse_collectives
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, annotate, copy_program, derive, info, tensor_spec
from graphpar.testing import compare
from graphpar.trace import trace
from graphpar.types import R
from graphpar.unfuse import is_fused, unfused
from graphpar.verify import verify

WIDTH = 8


class Net(nn.Module):
    """A norm, products of it, and a way back to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16, bias=False)
        self.down = nn.Linear(16, WIDTH)
        self.mask: Tensor
        self.register_buffer("mask", torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.tanh())
        return x + self.down(self.inner(y))  # type: ignore[no-any-return]

    def inner(self, y: Tensor) -> Tensor:
        return self.a(y) * self.b(y)  # type: ignore[no-any-return]


class Masked(Net):
    """A weight that is computed after the first product."""

    def inner(self, y: Tensor) -> Tensor:
        first = self.a(y)
        return first * F.linear(y, self.b.weight * self.mask)  # type: ignore[no-any-return]


class Dependent(Net):
    """A weight that depends on the first product: no op can give both."""

    def inner(self, y: Tensor) -> Tensor:
        first = self.a(y)
        return first * F.linear(y, self.b.weight * first.detach().sum())  # type: ignore[no-any-return]


class Mixed(Net):
    """The gathered tensor is read by more than products."""

    def inner(self, y: Tensor) -> Tensor:
        return self.a(y) * self.b(y.flip(1))  # type: ignore[no-any-return]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.a.parameters(), *self.b.parameters(), *self.norm.parameters()):
            parameter.requires_grad_(False)


def built(kind: type[Net], *, sp: bool = True, **options: Any) -> tuple[Program, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).double()
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    stages = run_pipeline(trace(model, (x,)), default_pipeline(tp=2, sp=sp, **options))
    return list(stages.values())[-1], (model, (x,))


def fused(program: Program) -> dict[str, int]:
    nodes = (node for _, graph in program.graphs() for node in graph.nodes if is_fused(node))
    return Counter(str(node.target).split(".")[1] for node in nodes)


@pytest.mark.parametrize(
    ("kind", "sp", "wanted"),
    [
        (Net, True, {"gather_linear": 1, "linear_scatter": 1, "convert_many": 1}),
        (Net, False, {"convert_linear": 1}),
        (Masked, True, {"gather_linear": 1, "linear_scatter": 1, "convert_many": 1}),
        (Dependent, True, {"linear_scatter": 1, "convert_many": 1}),
        (Frozen, True, {"gather_linear": 1, "linear_scatter": 1}),
    ],
)
def test_what_is_fused(kind: type[Net], sp: bool, wanted: dict[str, int]) -> None:
    program, call = built(kind, sp=sp)
    assert fused(program) == wanted
    compare(program, *call)


def find(program: Program, name: str) -> Any:
    """The one node with that op or name."""
    (found,) = [
        node
        for _, graph in program.graphs()
        for node in graph.nodes
        if node.name == name or f"graphpar.{name}." in str(node.target)
    ]
    return found


def block_step(program: Program, name: str) -> tuple[GraphRun, Step]:
    run = next(s.block for s in dry_run(program).steps if s.block is not None)
    node = find(program, name)
    return run, next(s for s in run.steps if s.node is node)


def test_products_share_one_shard() -> None:
    program, _ = built(Net)
    x, weights, biases, *_ = find(program, "gather_linear").args
    assert [len(weights), biases[1]] == [2, None]
    run, step = block_step(program, "gather_linear")
    kept = [run.storages[s] for s in step.saves if not run.storages[s].resident]
    assert [s.nbytes for s in kept] == [tensor_spec(x).nbytes // 2]


def test_what_more_than_products_read_is_gathered_once() -> None:
    program, call = built(Mixed)
    assert "gather_linear" not in fused(program)
    compare(program, *call)


def test_it_can_be_switched_off() -> None:
    assert not fused(built(Net, overlap=False)[0])


def test_complex_products_are_left_alone() -> None:
    """Gradients of complex products have conjugates in them."""
    program = copy_program(built(Net, overlap=False)[0])
    for _, graph in program.graphs():
        for node in graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                annotate(node, spec=replace(tensor_spec(node), dtype=torch.complex128))
    assert fused(fuse_collectives(program)) == {"convert_many": 1}


def test_large_parameters_are_converted_alone() -> None:
    program, _ = built(Net, overlap=False)
    pipeline = run_pipeline(program, default_pipeline(tp=2)[-1:])
    assert fused(list(pipeline.values())[-1])["convert_many"] == 1
    limited = default_pipeline(tp=2)[-1]
    small = type(limited.options)(small_bytes=8 * WIDTH - 1)
    assert "convert_many" not in fused(type(limited)(limited.name, small).run(program))


def test_frozen_weights_keep_nothing() -> None:
    """Nothing of the gathered tensor is needed, and backward gathers nothing."""
    program, _ = built(Frozen)
    run, step = block_step(program, "gather_linear")
    assert all(run.storages[s].resident for s in step.saves)


def test_parts_are_those_before() -> None:
    """The inverse: the same ops and types as without the pass."""

    def ops(program: Program) -> Counter[Any]:
        nodes = (node for _, graph in program.graphs() for node in graph.nodes)
        return Counter((n.target, info(n).type) for n in nodes if n.op == "call_function")

    program, _ = built(Net)
    assert ops(unfused(program)) == ops(built(Net, overlap=False)[0])


def test_an_item_of_another_type_is_refused() -> None:
    program = copy_program(built(Net)[0])
    verify(program)
    item = find(program, "norm_weight_rep")
    assert info(item).type == R
    fused_node = item.args[0]
    kinds: Any = info(fused_node).type
    annotate(fused_node, type=(program.state["0.norm.weight"].type, *kinds[1:]))
    with pytest.raises(VerifyError, match="not item"):
        verify(program)


def test_state_that_is_read_early_stays_in_its_place() -> None:
    program = copy_program(built(Net, overlap=False)[0])
    (graph,) = program.blocks.values()
    converted = [n for n in graph.nodes if n.target is torch.ops.graphpar.convert.default]
    first, *_, last = [n for n in converted if n.args[0].op == "get_attr"]
    value: Any = last.args[0]
    first.prepend(value)
    with graph.inserting_before(first):
        derive(graph, torch.ops.aten.relu.default, (value,), like=value, origin="test")
    found = fuse_collectives(program)
    assert fused(found)["convert_many"] == 1
    for fused_graph in found.blocks.values():
        fused_graph.lint()
