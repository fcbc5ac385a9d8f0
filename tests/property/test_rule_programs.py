"""Rules in programs, where later ops refine the axes that earlier ones were given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from graphpar.axes import Axis, Dims, Freezer, OpAxes, TermDims, fresh
from graphpar.passes.rules import Call, OpRule, op_axes, shard_strategy, tensor_arguments
from graphpar.passes.rules.table import apply_rule, freeze
from graphpar.program import Info, set_info, spec_of
from tests.property.pick import LIMIT, Pick, factorisations
from tests.property.rule_checks import (
    RANKS,
    Case,
    Checker,
    Target,
    add_placeholder,
    axes_in,
    derived,
    execute,
    show,
    spec_of_results,
    strategies,
)

aten = torch.ops.aten


class Program:
    """Ops run one by one, with axes that they share, as name-axes finds them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Tensor] = {}
        self.terms: dict[fx.Node, TermDims] = {}
        self.rules: list[tuple[fx.Node, Call, OpRule | None]] = []
        self.freezer = Freezer()

    def input(self, value: Tensor) -> fx.Node:
        node = add_placeholder(self.graph, value)
        self.values[node], self.terms[node] = value, fresh(value.shape)
        return node

    def call(self, target: Target, *args: Any, **kwargs: Any) -> list[fx.Node]:
        """The nodes of the op's results."""
        operands: list[Tensor] = []
        fx.node.map_arg((args, kwargs), lambda n: operands.append(self.values[n]))
        value = execute(target, args, kwargs, operands)
        node = self.graph.call_function(target, args, kwargs)
        set_info(node, Info(spec_of_results(value)))
        call, rule = apply_rule(node, self.terms.__getitem__)
        self.rules.append((node, call, rule))
        several = not isinstance(value, Tensor)
        results = []
        for i, y in enumerate(value if several else [value]):
            result = self.graph.call_function(operator.getitem, (node, i)) if several else node
            if several:
                set_info(result, Info(spec_of(y)))
            self.values[result] = y.contiguous()
            self.terms[result] = rule.results[i] if rule else fresh(y.shape)
            results.append(result)
        return results

    def one(self, target: Target, *args: Any, **kwargs: Any) -> fx.Node:
        (result,) = self.call(target, *args, **kwargs)
        return result

    def dims(self, node: fx.Node) -> Dims:
        return self.freezer.dims(self.terms[node])

    def ops(self) -> Iterator[tuple[fx.Node, OpAxes]]:
        """Every op with its rule in terms of the program's axes; ask once all are called."""
        for node, call, rule in self.rules:
            yield node, freeze(self.freezer, call, rule)

    def checker(self, node: fx.Node, op: OpAxes) -> Checker:
        operands = [self.values[n] for n in tensor_arguments(node)]
        assert isinstance(node.target, Target)
        return Checker(node, operands, op, Case(node.target, ()))


# --- random programs ----------------------------------------------------------------------------


def reshape(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    shape = list(program.values[x].shape)
    at = p.number(0, max(len(shape) - 1, 0))
    if shape and p.flag():
        shape[at : at + 1] = p.one(factorisations(shape[at]))
    elif p.flag():
        shape[at : at + 2] = [-1]
    else:
        shape = list(p.one(factorisations(program.values[x].numel())[:100]))
    return program.call(aten.reshape.default, x, shape)


def transpose(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    rank = program.values[x].dim()
    return program.call(aten.transpose.int, x, p.dim(rank), p.dim(rank))


def split(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    value = program.values[x]
    dim = p.dim(value.dim())
    if not value.dim():
        return []
    return program.call(aten.split_with_sizes.default, x, p.sizes(value.shape[dim]), dim)


def slice_(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    value = program.values[x]
    dim = p.dim(value.dim())
    if not value.dim():
        return []
    sizes = p.sizes(value.shape[dim])
    start = sum(sizes[: p.number(0, len(sizes) - 1)])
    return program.call(aten.slice.Tensor, x, dim, start, start + max(sizes[-1], 1))


def cat(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    value = program.values[x]
    dim = p.dim(value.dim())
    if not value.dim():
        return []

    def others(y: Tensor) -> list[int]:
        return [size for i, size in enumerate(y.shape) if i != dim % value.dim()]

    fitting = [
        n
        for n, y in program.values.items()
        if y.dim() == value.dim() and others(y) == others(value) and y.numel() <= LIMIT
    ]
    tensors = [p.one(fitting) for _ in range(p.number(1, 2))]
    tensors.insert(p.number(0, len(tensors)), x)
    return program.call(aten.cat.default, tensors, dim)


def add(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    shape = program.values[x].shape
    return program.call(
        aten.add.Tensor, x, p.one([n for n, y in program.values.items() if y.shape == shape])
    )


def product(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    """A product with a new weight, or with another value transposed."""
    value = program.values[x]
    if not value.dim():
        return []
    width = value.shape[-1]
    fitting = [n for n, y in program.values.items() if y.dim() == 2 and y.shape[1] == width]
    if p.flag() or not fitting:
        fitting = [program.input(p.x(p.size(), width))]
    return program.call(aten.linear.default, x, p.one(fitting))


def reduce(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    rank = program.values[x].dim()
    target = p.one((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default))
    return program.call(target, x, p.dims(rank, 0), p.flag())


def softmax(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    return program.call(aten.softmax.int, x, p.dim(program.values[x].dim()))


def grow(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    value = program.values[x]
    if value.dim() and p.flag():
        return program.call(aten.repeat_interleave.self_int, x, 2, p.dim(value.dim()))
    return program.call(aten.expand.default, x, [p.number(2, 3), *value.shape])


def unbind(p: Pick, program: Program, x: fx.Node) -> list[fx.Node]:
    value = program.values[x]
    if not value.dim():
        return []
    return program.call(aten.unbind.int, x, p.dim(value.dim()))


STEPS = (
    reshape,
    reshape,
    transpose,
    split,
    split,
    slice_,
    cat,
    cat,
    add,
    add,
    product,
    reduce,
    softmax,
    grow,
    unbind,
)


@given(data=st.data())
def test_every_op_of_a_program_on_shards_is_the_op(data: st.DataObject) -> None:
    pick, program = Pick(data.draw), Program()
    shape = pick.shape(1, 3)
    pool = [program.input(pick.x(*shape)), program.input(pick.x(*shape))]
    for _ in range(pick.number(2, 7)):
        step: Callable[[Pick, Program, fx.Node], list[fx.Node]] = pick.one(STEPS)
        found = step(pick, program, pick.one(pool))
        pool += [n for n in found if 0 < program.values[n].numel() <= LIMIT]
    ops = list(program.ops())
    ranks = pick.one(RANKS)
    for node, op in ops:
        program.checker(node, op).check_all(ranks)
        alone = op_axes(node)
        for _, strategy in strategies(op, ranks):
            assert derived(alone, strategy, ranks) == strategy, f"{node}: {show(strategy)}"


# --- what a sharded axis reaches ----------------------------------------------------------------


def types_of(program: Program, axis: Axis, ranks: int = 2) -> dict[str, str]:
    """The strategy of every op that has the axis, if that axis is cut."""
    found = {}
    for node, op in program.ops():
        if axis in axes_in(op):
            strategy = shard_strategy(op, {axis: (axis.size,)}, ranks)
            found[node.name] = show(strategy) if strategy else "whole"
            if strategy:
                program.checker(node, op).check(strategy, ranks)
    return found


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_heads_of_packed_thirds() -> None:
    """GPT-2: one projection to q, k and v, split, viewed as heads."""
    p = Program()
    x, w, out = map(p.input, tensors((2, 6, 8), (36, 8), (8, 12)))
    parts = p.call(aten.split.Tensor, p.one(aten.linear.default, x, w), 12, -1)
    q, k, v = (
        p.one(aten.transpose.int, p.one(aten.view.default, part, [2, 6, 4, 3]), 1, 2)
        for part in parts
    )
    y = p.one(aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, True)
    y = p.one(aten.reshape.default, p.one(aten.transpose.int, y, 1, 2), [2, 6, 12])
    p.one(aten.linear.default, y, out)
    (heads,) = p.dims(q)[1]
    assert isinstance(heads, Axis)
    assert types_of(p, heads) == {
        "linear_default": "R S0(12,12,12) -> S2(12,12,12)",
        "split_tensor": "S2(12,12,12) -> S2 S2 S2",
        "view_default": "S2 -> S2",
        "view_default_1": "S2 -> S2",
        "view_default_2": "S2 -> S2",
        "transpose_int": "S2 -> S1",
        "transpose_int_1": "S2 -> S1",
        "transpose_int_2": "S2 -> S1",
        "scaled_dot_product_attention_default": "S1 S1 S1 -> S1",
        "transpose_int_3": "S1 -> S2",
        "reshape_default": "S2 -> S2",
        "linear_default_1": "S2 S1 -> P",
    }


def test_heads_of_thirds_by_a_view() -> None:
    """ViT and nanoGPT-style code: (3, heads, width) and unbind; a bias rides along."""
    p = Program()
    x, w, b = map(p.input, tensors((2, 6, 8), (36, 8), (36,)))
    packed = p.one(aten.linear.default, x, w, b)
    five = p.one(
        aten.permute.default, p.one(aten.view.default, packed, [2, 6, 3, 4, 3]), [2, 0, 3, 1, 4]
    )
    q, k, v = p.call(aten.unbind.int, five)
    p.one(aten.scaled_dot_product_attention.default, q, k, v)
    heads = p.dims(q)[1][0]
    assert isinstance(heads, Axis)
    assert types_of(p, heads) == {
        "linear_default": "R S0(12,12,12) S0(12,12,12) -> S2(12,12,12)",
        "view_default": "S2(12,12,12) -> S3",
        "permute_default": "S3 -> S2",
        "unbind_int": "S2 -> S1 S1 S1",
        "scaled_dot_product_attention_default": "S1 S1 S1 -> S1",
    }


def test_heads_of_a_packed_grouped_query_projection() -> None:
    p = Program()
    x, w = map(p.input, tensors((2, 5, 8), (24 + 6 + 6, 8)))
    packed = p.one(aten.linear.default, x, w)
    q, k, v = (
        p.one(aten.transpose.int, p.one(aten.view.default, part, [2, 5, -1, 3]), 1, 2)
        for part in p.call(aten.split_with_sizes.default, packed, [24, 6, 6], -1)
    )
    p.one(aten.scaled_dot_product_attention.default, q, k, v, enable_gqa=True)
    heads = p.dims(k)[1][0]
    assert isinstance(heads, Axis)
    assert heads.size == 2
    found = types_of(p, heads)
    assert found["linear_default"] == "R S0(24,6,6) -> S2(24,6,6)"
    assert found["split_with_sizes_default"] == "S2(24,6,6) -> S2 S2 S2"
    assert found["scaled_dot_product_attention_default"] == "S1 S1 S1 -> S1"
    assert "whole" not in found.values()


def test_width_of_a_packed_gate() -> None:
    p = Program()
    x, w, down = map(p.input, tensors((3, 8), (24, 8), (8, 12)))
    gate, up = p.call(aten.chunk.default, p.one(aten.linear.default, x, w), 2, -1)
    y = p.one(aten.mul.Tensor, p.one(aten.silu.default, gate), up)
    p.one(aten.linear.default, y, down)
    width = p.dims(y)[1][0]
    assert isinstance(width, Axis)
    assert types_of(p, width) == {
        "linear_default": "R S0(12,12) -> S1(12,12)",
        "chunk_default": "S1(12,12) -> S1 S1",
        "silu_default": "S1 -> S1",
        "mul_tensor": "S1 S1 -> S1",
        "linear_default_1": "S1 S1 -> P",
    }


def test_sequence_through_flat_tokens() -> None:
    p = Program()
    x, w = map(p.input, tensors((2, 6, 8), (4, 8)))
    flat = p.one(aten.view.default, x, [12, 8])
    y = p.one(aten.view.default, p.one(aten.linear.default, flat, w), [2, 6, 4])
    p.one(aten.layer_norm.default, y, [4])
    p.one(aten.mean.dim, y, [1])
    sequence = p.dims(x)[1][0]
    assert isinstance(sequence, Axis)
    assert types_of(p, sequence) == {
        "view_default": "S1 -> S0(6,6)",
        "linear_default": "S0(6,6) R -> S0(6,6)",
        "view_default_1": "S0(6,6) -> S1",
        "layer_norm_default": "S1 -> S1",
        "mean_dim": "S1 -> P",
    }
