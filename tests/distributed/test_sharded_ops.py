"""Ops along a sharded axis on real ranks, against the ops run whole: forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar import ops
from graphpar.types import I, P, Shard, Type, cut, dual
from tests.distributed.harness import run_processes, run_threads

aten = torch.ops.aten
Forward = Callable[..., Tensor]
Case = tuple[Forward, Forward, Sequence[Tensor], Sequence[Type | None], Type]
"""The op on shards and the op, both of the operands; their types (``None``: whole, without a
gradient) and that of the result."""


def cases(ranks: int, group: str) -> Iterator[Case]:
    """Every op, with classes in one block and in two, even and uneven."""
    odd = 2 * ranks + 1
    for blocks, units in (((4 * ranks,), 0), ((3 * ranks, ranks), 0), ((odd, 2 * odd), odd)):
        yield from cases_of(blocks, units, group)


def cases_of(blocks: tuple[int, ...], units: int, group: str) -> Iterator[Case]:
    classes, random = sum(blocks), torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, classes, shape, generator=random)

    table, chosen = normal(classes, 3), ids(2, 5)
    place = (blocks, group, units)
    for padding in (-1, int(chosen[1, 2])):
        yield (
            lambda w, i, p=padding, a=place: ops.embedding(w, i, p, False, False, 0, *a),
            lambda w, i, p=padding: aten.embedding(w, i, p),
            (table, chosen),
            (Shard(0, blocks, units), None),
            P,
        )
    logits, labels, weight = normal(6, classes, 2), ids(6, 2), normal(classes).abs()
    labels[2:4] = -100
    shard = Shard(1, blocks, units)
    yield (
        lambda x, a=place: ops.log_softmax(x, 1, None, 1, *a),
        lambda x: x.log_softmax(1),
        (logits,),
        (shard,),
        shard,
    )
    yield (
        lambda x, i, a=place: ops.gather(x, 1, i, False, 1, *a),
        lambda x, i: x.gather(1, i),
        (logits, ids(6, 3, 2)),
        (shard, None),
        P,
    )
    for number, name in enumerate(("none", "mean", "sum")):
        for smoothing in (0.0, 0.1):
            yield (
                lambda x, y, w, n=number, s=smoothing, a=place: ops.cross_entropy(
                    x, y, w, n, -100, s, 1, *a
                ),
                lambda x, y, w, n=name, s=smoothing: F.cross_entropy(
                    x, y, w, reduction=n, label_smoothing=s
                ),
                (logits, labels, weight),
                (shard, None, Shard(0, blocks, units)),
                I,
            )
        yield (
            lambda x, y, w, n=number, a=place: ops.nll_loss(x, y, w, n, -100, 1, *a),
            lambda x, y, w, n=name: F.nll_loss(x, y, w, reduction=n),
            (logits, labels, weight),
            (shard, None, None),
            P,
        )


def check(rank: int, ranks: int, group: str, case: Case, backend: str) -> None:
    on_shards, whole, operands, kinds, result = case

    def part(x: Tensor, kind: Type | None) -> Tensor:
        return cut(x, kind, rank, ranks).clone() if isinstance(kind, Shard) else x.clone()

    mine = [part(x, kind) for x, kind in zip(operands, kinds, strict=True)]
    all_of = [x.clone() for x in operands]
    mine[0].requires_grad_()
    all_of[0].requires_grad_()
    if backend:
        torch._dynamo.reset()  # cases share their code
        on_shards = torch.compile(on_shards, backend=backend, fullgraph=True)
    found, expected = on_shards(*mine), whole(*all_of)
    cotangent = torch.sin(torch.arange(expected.numel(), dtype=torch.float64) + 1)
    cotangent = cotangent.view(expected.shape)
    (gradient,) = torch.autograd.grad(found, mine[0], part(cotangent, dual(result)))
    (wanted,) = torch.autograd.grad(expected, all_of[0], cotangent)
    if result == P:
        found = ops.all_reduce(found.detach(), "I", group)
    for one, other in ((found, part(expected, result)), (gradient, part(wanted, kinds[0]))):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-12, atol=1e-12)


def check_all(rank: int, group: str, ranks: int, backends: tuple[str, ...] = ("",)) -> int:
    count = 0
    for backend in backends:
        for case in cases(ranks, group):
            check(rank, ranks, group, case, backend)
            count += 1
    return count


@pytest.mark.parametrize("ranks", [2, 4])
def test_threads(ranks: int) -> None:
    assert run_threads(ranks, check_all, ranks) == [39] * ranks


def test_gloo_processes_also_compiled() -> None:
    assert run_processes(2, check_all, 2, ("", "aot_eager"), timeout=300) == [78, 78]


def bytes_saved(rank: int, group: str, ranks: int) -> tuple[int, Any]:
    """What backward keeps of a loss over bfloat16 logits, and the dtypes of the result."""
    x = torch.randn(8, 64 // ranks, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        if value.is_floating_point():
            saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        labels = torch.arange(8) * 8
        loss = ops.cross_entropy(x, labels, None, 1, -100, 0.1, 1, (64,), group)
    loss.backward()
    assert x.grad is not None
    return sum(saved.values()), (loss.dtype, x.grad.dtype)


def test_backward_keeps_one_float32_tensor_of_the_logits() -> None:
    for saved, dtypes in run_threads(2, bytes_saved, 2):
        assert dtypes == (torch.bfloat16, torch.bfloat16)
        assert saved < 1.2 * (8 * 32 * 4)
