"""Conversions and the products beside them as one op, which overlaps the two in backward.

A fused op is what its parts are (:mod:`graphpar.unfuse` takes it apart); it differs in what
autograd keeps, and in when collectives run:

- Products that share an operand converted to Replicate keep that operand as it was, the shard of
  it, and convert it once more in backward, for all of them, while the gradient of the operand is
  computed. The collective of that gradient runs while those of the weights are (Korthikanti et al.
  2022, section 4.2.2, for g; the same holds for f).
- A product before a reduce-scatter: the gather of its gradient runs while that of the bias is
  computed.
- Parameters converted together: one all-reduce for all of their gradients.

Operands may be parameters as they are, DTensors: an op reads what the rank holds, and its node
gives their gradients. Where derivatives of gradients are asked for, backward is made of the typed
conversions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphpar.local import applied, held, of_parameters, seen, split_parameters
from graphpar.ops.collectives import Finish, is_recorded
from graphpar.ops.kernels import all_reduced, starter
from graphpar.ops.table import conversion, gradient
from graphpar.types import I, P, R, Shard, Type

_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


Call = tuple[torch._ops.OpOverload, tuple[Any, ...]]


class _Conversion:
    """A conversion that can be started, and so can that of its gradient."""

    def __init__(self, source: Type, target: Type, group: str) -> None:
        self.forward: Call = conversion(source, target, group)
        self.backward: Call = gradient(*self.forward)
        self.begin, self.begin_gradient = (
            starter(_name(op), args) for op, args in (self.forward, self.backward)
        )

    def again(self, x: Tensor) -> Finish:
        """In backward, where a gradient may have derivatives itself."""
        if torch.is_grad_enabled():
            return partial(self.forward[0], x, *self.forward[1])
        return self.begin(x)

    def of_gradient(self, grad: Tensor) -> Finish:
        if torch.is_grad_enabled():
            return partial(self.backward[0], grad, *self.backward[1])
        return self.begin_gradient(grad)


@lru_cache(maxsize=4096)
def _gathering(dim: int, blocks: tuple[int, ...], units: int, group: str) -> _Conversion:
    return _Conversion(Shard(dim, blocks, units), R, group)


@lru_cache(maxsize=4096)
def _scattering(dim: int, blocks: tuple[int, ...], units: int, group: str) -> _Conversion:
    return _Conversion(P, Shard(dim, blocks, units), group)


@lru_cache
def _converting(group: str) -> _Conversion:
    return _Conversion(I, R, group)


def _name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.removeprefix("graphpar::")


def _plainly(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward, given what was saved, that runs below autograd unless its results have
    derivatives themselves."""

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors  # a recomputed region runs again here, with autograd
        if torch.is_grad_enabled():
            return backward(ctx, saved, *grads)
        with _below_autograd():
            return backward(ctx, saved, *grads)

    return run


def gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
    keep: bool = False,
) -> list[Tensor]:
    return _linears(_gathering(dim, tuple(blocks), units, group), keep, x, weights, biases)


def convert_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: str
) -> list[Tensor]:
    return _linears(_converting(group), False, x, weights, biases)


def _linears(
    step: _Conversion,
    keep: bool,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    if torch.is_grad_enabled() and _any_trains([x, *weights, *biases]):
        return list(_linears_of((step, keep, len(weights)), x, *weights, *biases))
    with _below_autograd():
        return _products(step.begin(x)(), _held(weights), _held(biases))


def _any_trains(operands: Sequence[Tensor | None]) -> bool:
    return True in [x.requires_grad for x in operands if x is not None]


def _held(operands: Sequence[Any]) -> list[Any]:
    return [x._local_tensor if isinstance(x, DTensor) else x for x in operands]


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """``aten.linear`` by the ops that compute: below autograd it is one op, which has no cost.

    No biases: all are None.
    """
    *shape, size = x.shape
    rows = x.reshape(-1, size)
    results = []
    for w, b in zip(weights, biases or (None,) * len(weights), strict=True):
        y = rows.mm(w.t()) if b is None else torch.addmm(b, rows, w.t())
        results.append(y.view(*shape, y.size(1)))
    return results


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[_Conversion, bool, int], x: Tensor, *operands: Any
    ) -> tuple[Tensor, ...]:
        step, keep, count = how
        ctx.parameters, local = split_parameters(operands)
        weights = local[:count]
        with _below_autograd():
            whole = step.begin(x)()
            results = _products(whole, weights, local[count:])
        ctx.step = step
        ctx.transposed = [not w.is_contiguous() and w.t().is_contiguous() for w in weights]
        ctx.set_materialize_grads(False)
        _, of_x, *rest = ctx.needs_input_grad
        of_weights, of_biases = rest[:count], rest[count:]
        trains = True in of_weights
        ctx.save_for_backward(
            x if trains else None,
            whole if trains and keep else None,
            *(weights if of_x else (None,) * count),
        )
        if not of_x:
            fixed = zip(results, of_weights, of_biases or [False] * count, strict=True)
            ctx.mark_non_differentiable(*(y for y, w, b in fixed if not w and not b))
        return tuple(results)

    @staticmethod
    @_plainly
    def backward(
        ctx: Any, saved: Sequence[Any], *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, kept, *weights = saved
        if torch.is_grad_enabled():
            weights = seen(weights, ctx.parameters[: len(weights)])
        _, of_x, *rest = ctx.needs_input_grad
        of_weights, of_biases = rest[: len(grads)], rest[len(grads) :]
        again: Finish | None = None
        if True in of_weights:
            reuse = kept is not None and not torch.is_grad_enabled()
            again = (lambda: kept) if reuse else ctx.step.again(_later(ctx.step, x, grads))
        rows = [None if g is None else g.reshape(-1, g.size(-1)) for g in grads]
        pending: Finish | None = None
        if of_x:
            pending = ctx.step.of_gradient(_of_input(grads, rows, weights))
        whole = None if again is None else _rows(again())
        of_each: list[Tensor | None] = []
        for g, wanted, transposed in zip(rows, of_weights, ctx.transposed, strict=True):
            of_each.append(_of_weight(g, whole, transposed) if wanted and g is not None else None)
        for g, wanted in zip(rows, of_biases, strict=bool(of_biases)):
            of_each.append(g.sum(0) if wanted and g is not None else None)
        of_each = of_parameters(of_each, ctx.parameters)
        return None, None if pending is None else pending(), *of_each


_linears_of = applied(_Linears)


def _later(step: _Conversion, x: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
    """``x``; for a compiler a copy that follows from a gradient. It would take a second gather of
    the same tensor for the first, and keep that between forward and backward."""
    if not is_recorded(x) or get_proxy_mode() is None or torch.is_grad_enabled():
        return x
    if step.forward[0] is not torch.ops.graphpar.all_gather.default:
        return x
    anchor = next(g for g in grads if g is not None)
    return torch.ops.graphpar.copy_after.default(x, anchor)  # type: ignore[no-any-return]


def copy_after(x: Tensor, anchor: Tensor) -> Tensor:
    """A copy of ``x``, not made before ``anchor`` is."""
    return x.clone()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _of_input(
    grads: Sequence[Tensor | None], rows: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> Tensor:
    """The gradient of the products' common operand; ``rows`` are those of ``grads``."""
    total: Tensor | None = None
    shape: Sequence[int] = ()
    for grad, each, weight in zip(grads, rows, weights, strict=True):
        if grad is None or each is None:
            continue
        if total is None:
            total, shape = each.mm(weight), grad.shape[:-1]
        elif torch.is_grad_enabled():
            total = torch.addmm(total, each, weight)
        else:
            total.addmm_(each, weight)
    assert total is not None  # autograd calls no backward without a gradient
    return total.reshape(*shape, total.size(-1))


def _of_weight(grad: Tensor, x: Tensor | None, transposed: bool) -> Tensor:
    """[n, k], laid out as the weight is, so that accumulating it copies nothing."""
    assert x is not None
    return x.t().mm(grad).t() if transposed else grad.t().mm(x)


# --- a product before a reduce-scatter ------------------------------------------------------------


def linear_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    blocks: Sequence[int],
    group: str,
    units: int = 0,
) -> Tensor:
    step = _scattering(dim, tuple(blocks), units, group)
    if torch.is_grad_enabled() and _any_trains((x, weight, bias)):
        return _linear_scatter_of(step, x, weight, bias)  # type: ignore[no-any-return]
    with _below_autograd():
        return _scattered(step, x, *_held([weight, bias]))


def _scattered(step: _Conversion, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    part = step.begin(_products(x, [weight], ())[0])()
    return part if bias is None else part.add_(bias)


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: _Conversion, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.parameters, (weight, bias) = split_parameters((weight, bias))
        with _below_autograd():
            part = _scattered(step, x, weight, bias)
        ctx.step, ctx.transposed = step, not weight.is_contiguous() and weight.t().is_contiguous()
        _, of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return part

    @staticmethod
    @_plainly
    def backward(ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved
        if torch.is_grad_enabled():
            (weight,) = seen([weight], ctx.parameters[:1])
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        pending = ctx.step.of_gradient(grads[0]) if of_x or of_weight else None
        bias = _rows(grads[0]).sum(0) if of_bias else None
        if pending is None:
            return None, None, None, *of_parameters([bias], ctx.parameters[1:])
        whole = pending()
        rows = _rows(whole)
        weight_grad = _of_weight(rows, _rows(x), ctx.transposed) if of_weight else None
        return (
            None,
            _of_input([whole], [rows], [weight]) if of_x else None,
            *of_parameters([weight_grad, bias], ctx.parameters),
        )


_linear_scatter_of = applied(_LinearScatter)

# --- parameters converted together ----------------------------------------------------------------


def convert_many(xs: Sequence[Tensor], group: str) -> list[Tensor]:
    trained = [x for x in xs if x.requires_grad and torch.is_grad_enabled()]
    if not trained:
        return [x.view_as(x) for x in _held(xs)]
    converted: Iterator[Tensor] = iter(_convert_many_of(group, *trained))
    return [next(converted) if x.requires_grad else held(x).view_as(held(x)) for x in xs]


class _ConvertMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters, local = split_parameters(xs)
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple([x.view_as(x) for x in local])

    @staticmethod
    @_plainly
    def backward(ctx: Any, _: Sequence[Any], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [g for g in grads if g is not None]
        if torch.is_grad_enabled():
            op = torch.ops.graphpar.all_reduce.default
            summed: Iterator[Tensor] = iter([op(g, "I", ctx.group) for g in present])
        else:
            summed = iter(all_reduced(present, ctx.group))
        of_each = [None if g is None else next(summed) for g in grads]
        return None, *of_parameters(of_each, ctx.parameters)


_convert_many_of = applied(_ConvertMany)
