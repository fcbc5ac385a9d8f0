"""What the rules' tests share: an op as a node, all ways to cut it, and the op run on shards.

An op is checked by running it once per rank on that rank's part of the operands, as a strategy
says, and comparing with the op run whole: the results put together by their types, and the
gradients by the duals of the operands' types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.axes import (
    Axis,
    Blocks,
    Concat,
    Dim,
    Dims,
    OpAxes,
    axes_of,
    match_blocks,
)
from graphpar.ops.reference import on_all_ranks
from graphpar.passes.rules import (
    Strategy,
    is_form,
    local_call,
    partial_strategies,
    shard_strategy,
)
from graphpar.program import Info, Spec, of_rank, set_info, spec_of
from graphpar.types import I, P, R, Shard, Type, cut, dual, join, local_shape, share, units_for
from tests.property.pick import Pick

RANKS = (2, 3, 4)
Cuts = Mapping[Axis, Blocks]
Target = torch._ops.OpOverload


@dataclass(frozen=True, slots=True)
class Case:
    """One op call: its arguments, with tensors in place. ``constant``: no gradient is asked of
    these operands."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constant: tuple[Tensor, ...] = ()


Maker = Callable[[Pick], Case]


# --- nodes --------------------------------------------------------------------------------------


def spec_of_results(value: object) -> Spec:
    if isinstance(value, Tensor):
        return spec_of(value)
    assert isinstance(value, (tuple, list))
    return tuple(spec_of(v) if isinstance(v, Tensor) else None for v in value)


def add_placeholder(graph: fx.Graph, value: Tensor) -> fx.Node:
    node = graph.placeholder(f"x{len(graph.nodes)}")
    set_info(node, Info(spec_of(value)))
    return node


def node_of(case: Case) -> tuple[fx.Node, list[Tensor]]:
    """The call as a node, and the values of its tensor arguments, repeated ones repeated."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    operands: list[Tensor] = []

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            operands.append(value)
            if id(value) not in nodes:
                nodes[id(value)] = add_placeholder(graph, value)
            return nodes[id(value)]
        if isinstance(value, (tuple, list)):
            return type(value)(map(convert, value))
        return value

    args = tuple(map(convert, case.args))
    kwargs = {name: convert(value) for name, value in case.kwargs.items()}
    node = graph.call_function(case.target, args, kwargs)
    result = execute(case.target, args, kwargs, [x.clone() for x in operands])
    set_info(node, Info(spec_of_results(result)))
    return node, operands


def execute(
    target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Tensor]
) -> Any:
    """Run the op with the operands in place of the nodes among its arguments."""
    args, kwargs = _with_values((args, kwargs), operands)
    return target(*args, **kwargs)


def _with_values(arguments: Any, operands: Sequence[Tensor]) -> Any:
    values = iter(operands)
    return fx.node.map_arg(arguments, lambda _: next(values))


# --- cuts ---------------------------------------------------------------------------------------


def layouts(size: int) -> Iterator[Blocks]:
    """Block layouts of an axis: one block, two equal ones, two different ones."""
    yield (size,)
    if size % 2 == 0:
        yield (size // 2, size // 2)
    if size % 3 == 0:
        yield (size // 3, size // 3 * 2)


def cuts_of(dim: Dim) -> Iterator[dict[Axis, Blocks]]:
    """Ways to cut a dimension: an axis of it, or one in each part of a concatenation."""
    for factor in dim:
        axis = factor.axis if isinstance(factor, Concat) else factor
        yield from ({axis: blocks} for blocks in layouts(axis.size))
        if isinstance(factor, Concat):
            choices = [list(islice(cuts_of(part), 4)) for part in factor.parts]
            for choice in islice(product(*choices), 16):
                merged: dict[Axis, Blocks] = {}
                for cuts in choice:
                    merged |= cuts
                yield merged


def all_cuts(tensors: Iterable[Dims]) -> list[dict[Axis, Blocks]]:
    """The cuts of every dimension of these tensors, each once, and some cuts of two axes of
    different dimensions at once."""
    found: dict[object, dict[Axis, Blocks]] = {}
    for dims in tensors:
        for dim in dims:
            for cuts in cuts_of(dim):
                found.setdefault(frozenset(cuts.items()), cuts)
    simple = [c for c in found.values() if all(len(blocks) == 1 for blocks in c.values())]
    for first, second in zip(simple, reversed(simple), strict=True):
        both = first | second
        found.setdefault(frozenset(both.items()), both)
    return list(found.values())


def strategies(op: OpAxes, ranks: int) -> Iterator[tuple[dict[Axis, Blocks], Strategy]]:
    """Every strategy that the rule allows, each once, with a cut that gives it."""
    seen: set[Strategy] = set()
    for cuts in all_cuts([*op.operands, *op.results]):
        units = units_for(math.gcd(*(size for blocks in cuts.values() for size in blocks)), ranks)
        strategy = shard_strategy(op, cuts, ranks, units) if units == 0 or units > ranks else None
        if strategy is not None and strategy not in seen:
            seen.add(strategy)
            yield cuts, strategy


def derived(op: OpAxes, strategy: Strategy, ranks: int) -> Strategy | None:
    """The strategy that follows from the operands' types alone (from the results' where no
    operand is sharded), as the verifier finds it."""
    types: list[tuple[Dims, Type]] = [*zip(op.operands, strategy.operands, strict=True)]
    if not any(isinstance(kind, Shard) for _, kind in types):
        types = [*zip(op.results, strategy.results, strict=True)]
    cuts: dict[Axis, Blocks] = {}
    units = max((kind.units for _, kind in types if isinstance(kind, Shard)), default=0)
    for dims, kind in types:
        if isinstance(kind, Shard):
            found = match_blocks(dims[kind.dim], kind.blocks, units or ranks)
            if found is None or any(cuts.get(a, b) != b for a, b in found.items()):
                return None
            cuts |= found
    return shard_strategy(op, cuts, ranks, units)


def axes_in(op: OpAxes) -> set[Axis]:
    return {a for dims in (*op.operands, *op.results) for dim in dims for a in axes_of(dim)}


def show(strategy: Strategy) -> str:
    """``S0 R -> P``; blocks are shown where there are several: ``S1(4,4)``."""

    def one(kind: Type) -> str:
        if not isinstance(kind, Shard):
            return str(kind)[0]
        blocks = f"({','.join(map(str, kind.blocks))})" if len(kind.blocks) > 1 else ""
        return f"S{kind.dim}{blocks}" + (f"/{kind.units}" if kind.units else "")

    return " -> ".join(" ".join(map(one, t)) for t in (strategy.operands, strategy.results))


# --- running an op on shards --------------------------------------------------------------------


def is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def close(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not is_inexact(expected):
        return torch.equal(actual, expected)
    tolerance = 1e-10 if expected.dtype in (torch.float64, torch.complex128) else 1e-5
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of an op, and its operands' gradients (``None``: not asked for)."""

    results: list[Tensor]
    gradients: list[Tensor | None]


class Checker:
    """The op run whole, once, and the strategies held against it."""

    def __init__(self, node: fx.Node, operands: Sequence[Tensor], op: OpAxes, case: Case) -> None:
        self.node, self.operands, self.op = node, operands, op
        constant = {id(x) for x in case.constant}
        self.wanted = [is_inexact(x) and id(x) not in constant for x in operands]
        self.generator = torch.Generator().manual_seed(0)
        self.cotangents: list[Tensor] = []
        self.whole = self._run(node.args, node.kwargs, operands, None)

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=self.generator, dtype=dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5
        return torch.randint(-9, 9, tuple(shape), generator=self.generator, dtype=dtype)

    def _leaves(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [
            x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(wanted)
            for x, wanted in zip(operands, self.wanted, strict=True)
        ]

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[Tensor],
        cotangents: list[Tensor] | None,
    ) -> Run:
        leaves = self._leaves(operands)
        assert isinstance(self.node.target, Target)
        value = execute(self.node.target, args, kwargs, leaves)
        several = isinstance(value, (tuple, list))
        results = [y for y in (value if several else [value]) if isinstance(y, Tensor)]
        if cotangents is None:
            cotangents = self.cotangents = [self._random(y.shape, y.dtype) for y in results]
        pairs = [(y, g) for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
        inputs = [x for x in leaves if x.requires_grad]
        found: Iterator[Tensor | None] = iter(())
        if pairs:
            ys, gs = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(ys, inputs, gs, allow_unused=True))
        gradients: list[Tensor | None] = []
        for x in leaves:
            grad = next(found, None) if x.requires_grad else None
            gradients.append(torch.zeros_like(x) if x.requires_grad and grad is None else grad)
        return Run([y.detach() for y in results], gradients)

    def _run_form(
        self,
        form: Target,
        args: tuple[Any, ...],
        operands: Sequence[Sequence[Tensor]],
        cotangents: Sequence[Tensor],
    ) -> list[Run]:
        """The op's form on shards, on all ranks together; one list of operands for each rank."""
        leaves = list(map(self._leaves, operands))
        calls = [_with_values(args, mine) for mine in leaves]
        name = form._schema.name.removeprefix("graphpar::")
        results = on_all_ranks(name, calls)
        asked = [y for y in results if y.requires_grad]
        if asked:
            torch.autograd.backward(asked, list(cotangents))
        return [
            Run([y.detach()], [x.grad for x in mine])
            for y, mine in zip(results, leaves, strict=True)
        ]

    @staticmethod
    def _share(strategy: Strategy, rank: int, ranks: int) -> float:
        """The rank's part of what is averaged."""
        units = next(kind.units for kind in strategy.operands if isinstance(kind, Shard))
        return share(units, rank, ranks)[1] / (units or ranks)

    def split(self, value: Tensor, kind: Type, ranks: int) -> list[Tensor]:
        """What each rank holds of a value."""
        if isinstance(kind, Shard):
            return [cut(value, kind, rank, ranks).contiguous() for rank in range(ranks)]
        if kind == P and value.dtype != torch.bool:
            addends = [self._random(value.shape, value.dtype) for _ in range(ranks - 1)]
            return [*addends, value - torch.stack(addends).sum(0).to(value.dtype)]
        return [value] * ranks

    def check(self, strategy: Strategy, ranks: int) -> None:
        """The op on shards gives the whole results and gradients."""
        target, args, kwargs = local_call(self.node, strategy.operands, strategy.results, ranks)
        operands = [
            self.split(x, kind, ranks)
            for x, kind in zip(self.operands, strategy.operands, strict=True)
        ]
        cotangents = [
            self.split(g, dual(kind), ranks)
            for g, kind in zip(self.cotangents, strategy.results, strict=True)
        ]
        passes_partial = P in strategy.operands
        runs: list[Run] = []
        if is_form(target):
            columns = zip(*operands, strict=True)
            runs = self._run_form(target, args, list(columns), cotangents[0])
        for rank in range(ranks if not runs else 0):
            averaged = self.op.average and not passes_partial and P in strategy.results
            scale = self._share(strategy, rank, ranks) if averaged else 1
            mine = [g[rank] * scale if averaged else g[rank] for g in cotangents]
            own_args, own_kwargs = of_rank((args, kwargs), rank)
            run = self._run(own_args, own_kwargs, [x[rank] for x in operands], mine)
            runs.append(Run([y * scale if averaged else y for y in run.results], run.gradients))
        for i, (kind, whole) in enumerate(zip(strategy.results, self.whole.results, strict=True)):
            parts = [run.results[i] for run in runs]
            shapes = [local_shape(whole.shape, kind, rank, ranks) for rank in range(ranks)]
            found_shapes = [tuple(part.shape) for part in parts]
            assert found_shapes == shapes, f"result {i} is {found_shapes} on ranks, not {shapes}"
            assert self._joined_equals(parts, kind, whole), f"result {i} is wrong"
        for i, (kind, grad) in enumerate(zip(strategy.operands, self.whole.gradients, strict=True)):
            if grad is not None:
                found = [g for g in (run.gradients[i] for run in runs) if g is not None]
                assert self._joined_equals(found, dual(kind), grad), (
                    f"the gradient of operand {i} is wrong"
                )

    @staticmethod
    def _joined_equals(parts: list[Tensor], kind: Type, whole: Tensor) -> bool:
        if isinstance(kind, Shard):
            return close(join(parts, kind), whole)
        if kind in (I, R):
            return all(close(part, whole) for part in parts)
        return close(torch.stack(parts).sum(0).to(whole.dtype), whole)

    def check_all(self, ranks: int) -> int:
        """Check all that the rule allows; how many strategies that was."""
        found = [s for _, s in strategies(self.op, ranks)] + partial_strategies(self.op)
        for strategy in found:
            try:
                self.check(strategy, ranks)
            except Exception as error:
                error.add_note(f"{self.node.format_node()}\n  {show(strategy)}, ranks={ranks}")
                shapes = [tuple(x.shape) for x in self.operands]
                error.add_note(f"  operands {shapes}\n  {describe(self.op)}")
                raise
        return len(found)


def describe(op: OpAxes) -> str:
    def dims(tensors: Iterable[Dims]) -> str:
        def one(dim: Dim) -> str:
            shown = []
            for factor in dim:
                if isinstance(factor, Axis):
                    shown.append(f"{factor}[{factor.size}]")
                else:
                    shown.append(f"{factor.axis}({' | '.join(map(one, factor.parts))})")
            return "·".join(shown) or "1"

        return ", ".join("[" + ", ".join(map(one, t)) + "]" for t in tensors)

    return (
        f"{dims(op.operands)} -> {dims(op.results)}, whole {sorted(map(str, op.whole))}, "
        f"contracted {sorted(map(str, op.contracted))}, partial {[sorted(p) for p in op.partial]}"
    )
