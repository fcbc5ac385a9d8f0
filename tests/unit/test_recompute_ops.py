"""The op of recomputation by itself: what autograd keeps, and what it gets in backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from graphpar import ops
from graphpar.cost import SavedTensors
from graphpar.errors import InternalError

Ops = Callable[..., Any]
BYTES = 8 * 5


def leaf(seed: int = 0, size: int = 5) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.rand(size, generator=made, dtype=torch.float64).add(0.5).requires_grad_()


def scaled_twice(x: Tensor) -> Tensor:
    return (x * 2).mul_(3)


def sine_of_exp(x: Tensor) -> Tensor:
    """Saves what it makes inside."""
    return x.exp().sin()


def chain(made: Ops, hold: Ops, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """``a`` and what ``b`` makes inside run again, ``c`` is held."""
    a = made(0, torch.exp, x)
    b = made(1, sine_of_exp, a)
    c = hold(scaled_twice, b)
    return [made(2, torch.tanh, c) * a], [c]


def chain_again(made: Ops, x: Tensor, c: Tensor) -> None:
    a = made(0, torch.exp, x)
    made(1, sine_of_exp, a)
    made(2, torch.tanh, c)


def plain(x: Tensor) -> Tensor:
    a = x.exp()
    return torch.tanh(scaled_twice(sine_of_exp(a))) * a


def run(x: Tensor) -> Tensor:
    (found,) = ops.recompute(chain, chain_again, [x], holds=True)
    assert isinstance(found, Tensor)
    return found


def test_values_gradients_and_bytes() -> None:
    """Twice through the same graph, and without a gradient."""
    x = leaf()
    with SavedTensors() as saved:
        found = run(x)
    assert saved.nbytes == 2 * BYTES  # x and c
    assert torch.equal(found, plain(x))
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(found.sum(), x, retain_graph=True)[0], expected)
    with torch.no_grad():
        assert torch.equal(run(x), found)


def test_second_derivatives() -> None:
    """The second run has no graph of its own, though the backward around it has."""
    assert torch.autograd.gradgradcheck(run, [leaf()])
    x, seen = leaf(), list[bool]()

    def watched(y: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return y * 2

    (found,) = ops.recompute(
        lambda made, hold, y: ([made(0, watched, y).sin()], []),
        lambda made, y: made(0, watched, y),
        [x],
    )
    torch.autograd.grad(found.sum(), x, create_graph=True)
    assert seen == [True, False]


def test_hooks_of_the_user_see_what_is_kept() -> None:
    x, seen = leaf(), list[Tensor]()

    def pack(value: Tensor) -> Tensor:
        seen.append(value)
        return value.clone()

    with saved_tensors_hooks(pack, lambda value: value):
        found = run(x)
    assert [value.nbytes for value in seen] == [BYTES, BYTES]
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])


def test_hooks_of_the_user_may_put_what_is_kept_elsewhere() -> None:
    """Of a part of a tensor its values alone: other views of it are kept too."""
    x = leaf(size=8)

    def region(made: Ops, hold: Ops, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        part = y.view(2, 3).t()[1:]
        return [(made(0, torch.exp, y).view(2, 3).t()[1:] * part * part.sin()).sum() * y.cos()], []

    with saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
        (found,) = ops.recompute(region, lambda made, y: made(0, torch.exp, y), [(x * 1)[2:]])
    (gradient,) = torch.autograd.grad(found.sum(), x)
    (direct,), _ = region(lambda _, op, *args: op(*args), lambda op, *args: op(*args), x[2:])
    expected = torch.autograd.grad(direct.sum(), x)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


def test_inside_of_a_checkpoint() -> None:
    x = leaf()
    found = checkpoint(lambda x: run(x).sin(), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(plain(x).sin().sum(), x)[0])


def test_somebody_looks_at_what_is_saved() -> None:
    x = leaf()
    (found,) = ops.recompute(
        lambda made, hold, x: ([made(0, torch.exp, x)], []),
        lambda made, x: made(0, torch.exp, x),
        [x],
    )
    for _ in range(2):
        assert torch.equal(found.grad_fn._saved_result, x.exp())


def views(made: Ops, x: Tensor) -> Tensor:
    """Saved are, of what is made, a transposed part, its numbers as another type, the conjugate,
    and a part of that which is to be negated."""
    y = made(0, torch.mul, x, 1 + 2j)
    part = y[2:].view(2, 2).t()
    numbers = torch.view_as_real(y).sin().sum() + y.conj().imag.square().sum()
    total: Tensor = numbers + (part * part).real.sum() + (y.conj() * y).real.sum()
    return total


def test_views_of_what_is_made_again() -> None:
    x = leaf(size=6)
    given = x * 1
    with SavedTensors() as saved:
        (found,) = ops.recompute(
            lambda made, hold, y: ([views(made, y)], []),
            lambda made, y: made(0, torch.mul, y, 1 + 2j),
            [given],
        )
    direct = views(lambda _, op, *args: op(*args), x)
    assert saved.nbytes == 8 * 6
    assert torch.equal(found, direct)
    (gradient,) = torch.autograd.grad(found, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(direct, x)[0], rtol=1e-14, atol=0)


def test_memory_that_is_used_again_is_not_taken_for_what_lay_there() -> None:
    """What is made again dies, and something else that is saved gets its address."""

    def region(made: Ops, hold: Ops, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        for _ in range(20):
            y = made(0, torch.neg, x)
            del y
            x = x.exp().log()
        return [x], []

    x = leaf(size=1000)
    (found,) = ops.recompute(region, lambda made, x: made(0, torch.neg, x), [x])
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(x))


@pytest.mark.parametrize("place", ["kept", "held"])
def test_a_value_that_is_written_later_is_refused(place: str) -> None:
    x = leaf()
    given = x * 1
    values = {"kept": given}

    def region(made: Ops, hold: Ops, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        results, held = chain(made, hold, y)
        values["held"] = held[0]
        return results, held

    (found,) = ops.recompute(region, chain_again, [given], holds=True)
    with torch.no_grad():
        values[place].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_another_second_run_is_an_error() -> None:
    x, calls = leaf(), list[int]()

    def fickle(x: Tensor) -> Tensor:
        return x.exp().sin().exp() if calls else x.exp().sin()

    for op, message in (
        (fickle, "saves 3 tensors, not 2"),
        (lambda x: x.neg()[len(calls) :], "gives"),
    ):
        calls.clear()
        (found,) = ops.recompute(
            lambda made, hold, x, op=op: ([made(0, op, x).cos()], []),
            lambda made, x, op=op: made(0, op, x),
            [x],
        )
        calls.append(1)
        with pytest.raises(InternalError, match=message):
            found.sum().backward()


def test_autocast_is_off_in_the_second_run() -> None:
    x, w = leaf(size=16).float().detach().view(4, 4).requires_grad_(), torch.eye(4)
    plain = torch.mm(x, w).sin()
    (found,) = ops.recompute(
        lambda made, hold, x: ([made(0, torch.mm, x, w).sin()], []),
        lambda made, x: made(0, torch.mm, x, w),
        [x],
    )
    with torch.autocast("cpu", torch.bfloat16):
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, plain)]
    assert torch.equal(*gradients)


def test_random_numbers_are_drawn_again() -> None:
    x = leaf(size=100)

    def draw(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    torch.manual_seed(3)
    (found,) = ops.recompute(
        lambda made, hold, x: ([made(0, draw, x)], []),
        lambda made, x: made(0, draw, x),
        [x],
        random=True,
    )
    after = torch.rand(1)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient * x, found)
    torch.manual_seed(3)
    draw(x)
    assert torch.equal(after, torch.rand(1))


def test_all_is_freed_with_the_graph() -> None:
    """By reference counts: no collector is waited for."""
    gc.disable()
    try:
        x = leaf()
        given = x * 1
        found = ops.recompute(chain, chain_again, [given], holds=True)
        gone = weakref.ref(given.untyped_storage())
        del given
        found[0].sum().backward()
        del found
        assert gone() is None
    finally:
        gc.enable()
