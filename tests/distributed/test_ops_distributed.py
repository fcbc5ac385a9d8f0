"""Every conversion on real ranks, against the reference: forward, backward, double backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpar import ops
from graphpar.errors import RankMismatchError
from graphpar.ops.agree import check_agreement
from graphpar.ops.reference import redistribute
from graphpar.types import I, P, R, Shard, Type, cut, dual, layout_arguments
from tests.distributed.harness import RankError, run_processes, run_threads


def layouts(ranks: int) -> list[tuple[int, ...]]:
    """Blocks of a dimension of 6 · ranks: one, two and three equal ones, unequal ones."""
    t = ranks
    return [(6 * t,), (3 * t, 3 * t), (2 * t, 2 * t, 2 * t), (t, 3 * t, 2 * t)]


def cases(ranks: int) -> Iterator[tuple[Type, Type, tuple[int, ...]]]:
    """(source, target, global shape) for every row of the table and every layout."""
    for source, target in ((I, R), (P, I), (P, R)):
        yield source, target, (3, 2, 5)
    shards = [Shard(dim, blocks) for dim in range(3) for blocks in layouts(ranks)]
    uneven = [Shard(dim, (t, 2 * t), t) for dim in range(3) for t in (ranks + 1, 2 * ranks + 1)]
    for a in (*shards, *uneven):
        for other in (R, I, P):
            yield a, other, _shape(a)
        for other in (P, I, R):
            yield other, a, _shape(a)
        for b in (*shards, *uneven):
            if a != b and (a.dim != b.dim or sum(a.blocks) == sum(b.blocks)):
                yield a, b, _shape(a, b)


def _shape(*kinds: Shard) -> tuple[int, ...]:
    sizes = [2, 3, 1]
    for kind in kinds:
        sizes[kind.dim] = sum(kind.blocks)
    return tuple(sizes)


def values(
    kind: Type, shape: Sequence[int], ranks: int, generator: torch.Generator
) -> list[Tensor]:
    """All ranks' tensors of a value of the given type."""
    whole = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if isinstance(kind, Shard):
        return [cut(whole, kind, rank, ranks).clone() for rank in range(ranks)]
    if kind == P:
        return [whole * (rank + 1) + rank for rank in range(ranks)]
    return [whole.clone() for _ in range(ranks)]


def check_case(rank: int, ranks: int, group: str, source: Type, target: Type, shape: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    xs = [x.requires_grad_() for x in values(source, shape, ranks, generator)]
    cotangents = [c.requires_grad_() for c in values(dual(target), shape, ranks, generator)]
    again = values(source, shape, ranks, generator)

    ys = redistribute(xs, source, target)
    gs = torch.autograd.grad(ys, xs, cotangents, create_graph=True)
    hs = torch.autograd.grad(gs, cotangents, again)

    x = xs[rank].detach().clone().requires_grad_()
    cotangent = cotangents[rank].detach().clone().requires_grad_()
    op, args = ops.conversion(source, target, group)
    y = op(x, *args)
    (g,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    (h,) = torch.autograd.grad(g, cotangent, again[rank])
    for got, expected in ((y, ys[rank]), (g, gs[rank]), (h, hs[rank])):
        torch.testing.assert_close(got, expected, msg=lambda m: f"{source} → {target}: {m}")
    if op is not torch.ops.graphpar.convert.default:
        assert y.is_contiguous()
        y.mul_(2)  # results may be written to, and share nothing with the input
    torch.testing.assert_close(x.detach(), xs[rank].detach(), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(op(x, *args), ys[rank].detach())


def check_all(rank: int, group: str, ranks: int) -> int:
    count = 0
    for source, target, shape in cases(ranks):
        check_case(rank, ranks, group, source, target, shape)
        count += 1
    return count


def check_other_dtypes(rank: int, group: str, ranks: int) -> None:
    """Masks and indices are gathered too; inputs need not be contiguous."""
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float16):
        whole = torch.arange(24 * ranks).view(4, 6 * ranks).remainder(3).to(dtype)
        shard = Shard(1, (2 * ranks, 4 * ranks))
        part = cut(whole, shard, rank, ranks)
        torch.testing.assert_close(ops.redistribute(part, shard, R, group), whole)
        assert ops.redistribute(whole, R, shard, group).equal(part)
        strided = part.t().contiguous().t()
        rows = Shard(0, (4 * ranks,))
        moved = ops.redistribute(strided.repeat(ranks, 1), shard, rows, group)
        assert moved.equal(cut(whole.repeat(ranks, 1), rows, rank, ranks))
    addend = torch.arange(6.0).view(2, 3).t().expand(3, 2) + rank
    total = ops.all_reduce(addend.t(), "I", group)
    expected = torch.arange(6.0).view(2, 3) * ranks + sum(range(ranks))
    torch.testing.assert_close(total, expected)


_turn = threading.Lock()


def check_dropout(rank: int, group: str, ranks: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shard in (
            Shard(1, (6 * ranks,)),
            Shard(0, (2 * ranks, 4 * ranks)),
            Shard(2, (ranks,)),
            Shard(1, (7, 14), 7),
        ):
            sizes = [6, 5, 4]
            sizes[shard.dim] = sum(shard.blocks)
            for p, train in ((0.1, True), (0.7, True), (0.5, False), (1.0, True), (0.0, True)):
                with _turn:  # threads share the generator
                    torch.manual_seed(3)
                    whole = torch.randn(sizes, dtype=dtype).requires_grad_()
                    expected = torch.dropout(whole, p, train)
                    after = torch.rand(3)
                    torch.manual_seed(3)
                    torch.randn(sizes, dtype=dtype)
                    part = cut(whole.detach(), shard, rank, ranks).requires_grad_()
                    got = ops.dropout(part, p, train, *layout_arguments(shard, group))
                    assert torch.rand(3).equal(after)
                assert got.equal(cut(expected, shard, rank, ranks))
                (whole_grad,) = torch.autograd.grad(expected.square().sum(), whole)
                (grad,) = torch.autograd.grad(got.square().sum(), part)
                assert grad.equal(cut(whole_grad, shard, rank, ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_threads(ranks: int) -> None:
    counts = run_threads(ranks, check_all, ranks)
    assert counts == [363] * ranks
    run_threads(ranks, check_other_dtypes, ranks)
    run_threads(ranks, check_dropout, ranks)


def on_processes(rank: int, group: str, ranks: int) -> str:
    check_all(rank, group, ranks)
    check_other_dtypes(rank, group, ranks)
    check_dropout(rank, group, ranks)
    check_compile(rank, group, ranks, "aot_eager")
    return check_mismatch(rank, group, ranks)


def check_odd_one_out(rank: int, group: str) -> str:
    with pytest.raises(RankMismatchError) as caught:
        check_agreement("odd" if rank == 1 else "even", group, "the plan")
    return str(caught.value)


def test_agreement_names_the_ranks() -> None:
    assert (
        run_threads(3, check_odd_one_out)
        == ["ranks differ in the plan: ranks 0, 2 have one version, rank 1 another"] * 3
    )


def check_mismatch(rank: int, group: str, ranks: int) -> str:
    check_agreement("same", group, "the program")
    with pytest.raises(RankMismatchError) as caught:
        check_agreement(f"digest {rank}", group, "the program", f"x = a\ny = b{rank}\n")
    return "\n".join([str(caught.value), *caught.value.__notes__])


def test_two_gloo_processes() -> None:
    texts = run_processes(2, on_processes, 2)
    assert texts[0] == texts[1]
    assert texts[0].splitlines() == [
        "ranks differ in the program: rank 0 has one version, rank 1 another",
        "first difference, line 2 of 2:",
        "  rank 0: y = b0",
        "  rank 1: y = b1",
    ]


def layer(x: Tensor, weight: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A chain through every op: x is Shard(1), the weight Invariant."""
    n = 6 * ranks
    w = ops.convert(weight, group)
    h = ops.all_gather(x, 1, (n,), "R", group)
    h = ops.shard(h.relu(), "R", 2, (ranks, 2 * ranks), group)
    h = ops.pad(h, 2, (ranks, 2 * ranks), group) @ w
    h = ops.reduce_scatter(h, 1, (2 * ranks, 4 * ranks), group)
    h = ops.all_to_all(h, 1, (2 * ranks, 4 * ranks), 0, (2 * ranks,), group)
    h = ops.dropout(h, 0.1, True, 0, (2 * ranks,), group)
    h = ops.all_to_all(h.sin(), 0, (2 * ranks,), 0, (ranks, ranks), group)
    h = ops.all_reduce(h.square(), "R", group)
    return h, ops.convert(weight, group), ops.all_gather(x, 1, (n,), "I", group)


def check_compile(rank: int, group: str, ranks: int, backend: str) -> None:
    torch.manual_seed(5)
    weight = torch.randn(3 * ranks, 3 * ranks).requires_grad_()
    whole = torch.randn(2 * ranks, 6 * ranks, 3 * ranks)
    x = cut(whole, Shard(1, (6 * ranks,)), rank, ranks).clone().requires_grad_()

    def run(fn: Any) -> list[Tensor]:
        torch.manual_seed(6)
        out = fn(x, weight, group, ranks)
        loss = sum(o.sin().sum() * (rank + 1) for o in out[:2]) + out[2].sum()
        return [*out, *torch.autograd.grad(loss, (x, weight))]

    expected = run(layer)
    got = run(torch.compile(layer, backend=backend, fullgraph=True))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.long
def test_inductor_on_two_gloo_processes() -> None:
    run_processes(2, check_compile, 2, "inductor", timeout=300)


def fail(rank: int, group: str) -> None:
    if rank == 1:
        raise ValueError("rank 1 is out of luck")
    ops.all_reduce(torch.ones(2), "I", group)


def test_errors_of_ranks_are_raised() -> None:
    with pytest.raises(RankError, match="rank 1 is out of luck"):
        run_threads(2, fail)
    with pytest.raises(RankError, match="rank 1 is out of luck"):
        run_processes(2, "tests.distributed.test_ops_distributed:fail", timeout=60)


def hang(rank: int, group: str) -> None:
    if rank == 0:
        ops.all_reduce(torch.ones(2), "I", group)
    else:
        threading.Event().wait()


def test_a_hang_is_killed() -> None:
    with pytest.raises(TimeoutError, match=r"not done after 5 s\nrank 0 was still running"):
        run_processes(2, hang, timeout=5)
