"""The table of conversions, the reference, and what compilers and fake tensors see of the ops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode

from graphpar import ops
from graphpar.errors import InternalError
from graphpar.ops.reference import redistribute
from graphpar.ops.sharded import ALL_REDUCES, SHARDED
from graphpar.ops.table import gradient
from graphpar.types import (
    CONVERSIONS,
    I,
    P,
    R,
    Shard,
    Type,
    convertible,
    cut,
    dual,
    join,
    letter,
    local_shape,
)
from tests.distributed.harness import default_group

RANKS = 4
EVEN = [Shard(0, (8,)), Shard(0, (4, 4)), Shard(1, (12,)), Shard(1, (8, 4)), Shard(1, (4, 4, 4))]
SHARDS = [*EVEN, Shard(1, (12,), 6), Shard(2, (5,), 5)]
TYPES: list[Type] = [I, R, P, *SHARDS]
PAIRS = [(a, b) for a, b in itertools.product(TYPES, TYPES) if convertible(a, b)]
SHAPE = (8, 12, 5)


@pytest.fixture
def fake_group() -> Iterator[str]:
    """The name of a fake group of four ranks: right shapes, meaningless values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=store)
    yield default_group()
    dist.destroy_process_group()


@pytest.fixture
def lone_group() -> Iterator[str]:
    """The name of a real group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield default_group()
    dist.destroy_process_group()


def test_the_table_has_the_rows_of_the_types() -> None:
    assert ops.CONVERSION_OPS.keys() == CONVERSIONS.keys()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_signature_is_the_inverse_of_conversion(source: Type, target: Type) -> None:
    op, args = ops.conversion(source, target, "tp")
    assert ops.is_conversion(op)
    assert ops.signature(op, args) == (source, target)
    assert gradient(op, args) == ops.conversion(dual(target), dual(source), "tp")
    assert gradient(*gradient(op, args)) == (op, args)


def test_what_is_no_conversion() -> None:
    for a, b in ((R, I), (I, P), (R, P), (I, I)):
        with pytest.raises(InternalError, match="no conversion from"):
            ops.conversion(a, b, "tp")
        if a != b:
            with pytest.raises(InternalError, match="no conversion from"):
                redistribute([torch.ones(2)], a, b)
    assert not ops.is_conversion(torch.ops.aten.relu.default)
    assert not ops.is_conversion(torch.ops.graphpar.dropout.default)
    assert not ops.is_conversion(len)
    with pytest.raises(InternalError, match="is not a conversion"):
        ops.signature(torch.ops.graphpar.all_reduce.default, ("S", "tp"))


def whole_value(parts: list[Tensor], kind: Type) -> Tensor:
    if isinstance(kind, Shard):
        return join(parts, kind)
    return sum(parts, torch.zeros(())) if kind == P else parts[0]


def random_value(kind: Type) -> list[Tensor]:
    whole = torch.randn(SHAPE, dtype=torch.float64)
    if isinstance(kind, Shard):
        return [cut(whole, kind, rank, RANKS).clone() for rank in range(RANKS)]
    if kind == P:
        return [torch.randn(SHAPE, dtype=torch.float64) for _ in range(RANKS)]
    return [whole.clone() for _ in range(RANKS)]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_reference_keeps_the_value_and_is_adjoint(source: Type, target: Type) -> None:
    """The whole value stays; ⟨y, ȳ⟩ = ⟨x, x̄⟩ over whole values; so does the second derivative."""
    torch.manual_seed(0)
    xs = [x.requires_grad_() for x in random_value(source)]
    ys = redistribute(xs, source, target)
    shapes = [local_shape(SHAPE, target, rank, RANKS) for rank in range(RANKS)]
    assert [tuple(y.shape) for y in ys] == shapes
    torch.testing.assert_close(whole_value(ys, target), whole_value(xs, source))
    if letter(target) in "IR":
        assert all(y.equal(ys[0]) for y in ys)

    y_grads = [c.requires_grad_() for c in random_value(dual(target))]
    x_grads = list(torch.autograd.grad(ys, xs, y_grads, create_graph=True))
    forward = (whole_value(ys, target) * whole_value(y_grads, dual(target))).sum()
    backward = (whole_value(xs, source) * whole_value(x_grads, dual(source))).sum()
    torch.testing.assert_close(forward, backward)
    if letter(source) in "IP":
        assert all(g.equal(x_grads[0]) for g in x_grads)

    again = torch.autograd.grad(x_grads, y_grads, [x.detach() for x in xs])
    for a, y in zip(again, ys, strict=True):
        torch.testing.assert_close(a, y)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_reference_results_share_no_memory(source: Type, target: Type) -> None:
    xs = random_value(source)
    before = [x.clone() for x in xs]
    ys = redistribute(xs, source, target)
    after = [y.clone() for y in ys]
    for rank, y in enumerate(ys):
        y.zero_()
        rest = zip(ys[rank + 1 :], after[rank + 1 :], strict=True)
        assert all(other.equal(kept) for other, kept in rest)
    assert all(x.equal(kept) for x, kept in zip(xs, before, strict=True))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_fake_shapes(fake_group: str, source: Type, target: Type) -> None:
    op, args = ops.conversion(source, target, fake_group)
    with FakeTensorMode():
        for device in ("cpu", "meta"):  # torch crashes on gradients of fake "cuda" without CUDA
            sizes = local_shape(SHAPE, source, 1, RANKS)
            x = torch.empty(sizes, dtype=torch.bfloat16, device=device, requires_grad=True)
            y = op(x, *args)
            assert y.shape == local_shape(SHAPE, target, 1, RANKS)
            assert (y.dtype, y.device) == (x.dtype, x.device)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


def test_fake_dropout(fake_group: str) -> None:
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            x = torch.empty(4, 6, dtype=torch.bfloat16, device=device)
            y = ops.dropout(x, 0.1, True, 1, (16, 8), fake_group)
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)


def test_blocks_must_fit(fake_group: str) -> None:
    x = torch.ones(6, 12)
    for source, target in (
        (P, Shard(0, (6,))),
        (P, Shard(1, (8, 8))),
        (Shard(0, (6,)), R),
        (Shard(0, (24,)), Shard(1, (10, 2))),
        (Shard(0, (24,)), Shard(0, (12,))),
        (I, Shard(1, (6, 6))),
        (Shard(1, (12,)), P),
    ):
        with pytest.raises(InternalError, match="does not lay out"):
            ops.redistribute(x, source, target, fake_group)


def test_convert_is_a_view_and_the_others_are_not(lone_group: str) -> None:
    x = torch.ones(4, 6, requires_grad=True)
    assert ops.convert(x, lone_group).data_ptr() == x.data_ptr()
    assert ops.redistribute(x, R, R, lone_group) is x
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        ops.convert(x, lone_group).add_(1)
    for source, target in (
        (P, R), (Shard(0, (4,)), I), (Shard(1, (6,)), R), (P, Shard(0, (4,))), (P, Shard(1, (6,))),
        (I, Shard(0, (4,))), (Shard(0, (4,)), P), (Shard(0, (4,)), Shard(1, (2, 4))),
    ):  # fmt: skip
        y = ops.redistribute(x, source, target, lone_group)
        y.add_(1)
        assert y.equal(x + 1)


def test_a_compiled_convert_keeps_its_gradient(fake_group: str) -> None:
    """A graph output that aliases an input is rebuilt outside the graph: not this one."""
    x = torch.ones(4, requires_grad=True)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph)

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(lambda x: ops.convert(x, fake_group), backend=compiler)
    compiled(x).backward(torch.ones(4))
    backward = [str(node.target) for node in graphs[-1].graph.nodes]
    assert backward.count("_c10d_functional.all_reduce.default") == 1


@pytest.mark.parametrize(
    ("source", "target"), [p for p in PAIRS if not {Shard(0, (8,)), Shard(1, (12,))} & {*p}],
    ids=str,
)  # fmt: skip
def test_opcheck(lone_group: str, source: Type, target: Type) -> None:
    tests = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    op, args = ops.conversion(source, target, lone_group)
    if letter(source) + letter(target) in ("IR", "IS", "RS", "SP"):
        # The others meet _c10d_functional.wait_tensor, which returns its argument, and refuse it.
        tests += ["test_schema", "test_faketensor"]
    torch.library.opcheck(op, (torch.randn(SHAPE, requires_grad=True), *args), test_utils=tests)


def test_opcheck_dropout(lone_group: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    shared = (1, (2, 4), lone_group)
    torch.library.opcheck(torch.ops.graphpar.dropout.default, (x, 0.0, True, *shared))
    torch.library.opcheck(torch.ops.graphpar.dropout_mask.default, (x, 0.5, *shared))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_dropout_draws_what_eager_draws(lone_group: str, backend: str) -> None:
    def layer(x: Tensor) -> Tensor:
        return ops.dropout(x.relu(), 0.3, True, 1, (8,), lone_group) * 2

    x = torch.randn(4, 8, requires_grad=True)
    results = []
    for fn in (
        layer,
        torch.compile(layer, backend=backend, fullgraph=True),
        lambda x: torch.dropout(x.relu(), 0.3, True) * 2,
    ):
        torch.manual_seed(1)
        y = fn(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(a.equal(b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_export_and_inference_mode(lone_group: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = ops.all_gather(ops.convert(x, lone_group), 1, (6,), "R", lone_group)
            return ops.all_reduce(h.relu(), "I", lone_group)

    x = torch.randn(4, 6)
    graph = torch.export.export(Model(), (x,), strict=False).graph
    called = [n.target for n in graph.nodes if ops.is_conversion(n.target)]
    table = torch.ops.graphpar
    assert called == [table.convert.default, table.all_gather.default, table.all_reduce.default]
    with torch.inference_mode():
        compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), x.relu())


# --- ops along a sharded axis -------------------------------------------------------------------


def calls_on_shards(blocks: tuple[int, ...], group: str, dtype: torch.dtype) -> dict[str, Any]:
    """A call of every op whose first operand has eight of the sharded dimension's elements."""
    x, ids = torch.randn(5, 8, dtype=dtype), torch.tensor([0, 7, 3, 3, 1])
    place = (blocks, group)
    return {
        "embedding": (x.t(), ids, 1, False, False, 0, *place),
        "gather": (x, 1, ids[:, None], False, 1, *place),
        "log_softmax": (x, 1, None, 1, *place),
        "cross_entropy": (x, ids, x[0].exp(), 1, 7, 0.1, 1, *place),
        "nll_loss": (x, ids, torch.ones(sum(blocks), dtype=dtype), 1, 7, 1, *place),
    }


@pytest.mark.parametrize("name", sorted(SHARDED))
@pytest.mark.parametrize("blocks", [(32,), (16, 16)])
def test_fake_ops_along_a_sharded_axis(fake_group: str, name: str, blocks: tuple[int, ...]) -> None:
    shapes = {"embedding": (5, 5), "gather": (5, 1), "log_softmax": (5, 8)}
    with FakeTensorMode():
        x, *args = calls_on_shards(blocks, fake_group, torch.bfloat16)[name]
        y = getattr(ops, name)(x.requires_grad_(), *args)
        assert y.shape == shapes.get(name, ())
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", sorted(SHARDED))
def test_opcheck_along_a_sharded_axis(lone_group: str, name: str) -> None:
    x, *args = calls_on_shards((8,), lone_group, torch.float64)[name]
    tests = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    if name not in ALL_REDUCES:
        tests += ["test_schema", "test_faketensor"]
    op = getattr(torch.ops.graphpar, name).default
    torch.library.opcheck(op, (x.detach().requires_grad_(), *args), test_utils=tests)


@pytest.mark.parametrize("name", sorted(SHARDED))
def test_all_reduces_are_as_many_as_said(lone_group: str, name: str) -> None:
    x, *args = calls_on_shards((8,), lone_group, torch.float64)[name]
    counts = []
    with CommDebugMode() as comms:
        y = getattr(ops, name)(x.detach().requires_grad_(), *args)
        counts.append(comms.get_total_counts())
        y.sum().backward()
        counts.append(comms.get_total_counts() - counts[0])
    assert tuple(counts) == ALL_REDUCES.get(name, (0, 0))
