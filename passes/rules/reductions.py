"""Rules of ops that combine or order the elements along some dimensions."""

from __future__ import annotations

from typing import Any

from graphpar.axes import TermDim, TermDims, unify
from graphpar.passes.rules.call import Call, OpRule
from graphpar.passes.rules.einsum import new_axis, whole_terms


def _reduced(call: Call) -> list[int]:
    """The reduced dimensions, from ``dim`` in any of its forms (absent: all of them)."""
    rank = len(call.x.shape)
    dim: Any = call.get("dim", call.get("dims"))
    dims = dim if isinstance(dim, list) else [] if dim is None else [dim]
    return sorted({int(d) % max(rank, 1) for d in dims} or set(range(rank)))


def _remaining(call: Call, reduced: list[int]) -> TermDims:
    keep = bool(call.get("keepdim", False))
    dims: TermDims = []
    for index, dim in enumerate(call.x.dims):
        if index not in reduced:
            dims.append(dim)
        elif keep:
            dims.append([])
    return dims


def _axes_along(call: Call, dims: list[int]) -> TermDim:
    return [term for d in dims if d < len(call.x.dims) for term in call.x.dims[d]]


def summed(call: Call) -> OpRule:
    """``sum``: linear, contracts."""
    dims = _reduced(call)
    out = _remaining(call, dims)
    return OpRule([out], contracted=_axes_along(call, dims), partial=[{0}])


def mean(call: Call) -> OpRule:
    rule = summed(call)
    rule.average = True
    return rule


def reduced_whole(call: Call) -> OpRule:
    """Other reductions (``amax``, ``var``, ``argmax``…): the reduced dimensions stay whole."""
    dims = _reduced(call)
    out = _remaining(call, dims)
    return OpRule([out] * len(call.results), whole=_axes_along(call, dims))


def norm_like(call: Call) -> OpRule:
    """An op that mixes along ``dim`` and keeps the shape: ``softmax``, ``cumsum``, ``sort``."""
    dims = _reduced(call)
    return OpRule([call.x.dims] * len(call.results), whole=_axes_along(call, dims))


def cumulative(call: Call) -> OpRule:
    rule = norm_like(call)
    rule.partial = [{0}]
    return rule


def roll(call: Call) -> OpRule:
    """Without dimensions it rolls the flat tensor."""
    dims = [d % max(len(call.x.shape), 1) for d in call["dims"]] or range(len(call.x.shape))
    return OpRule([call.x.dims], whole=_axes_along(call, list(dims)), partial=[{0}])


def counted(call: Call) -> OpRule:
    """``nansum``: contracts, but is not linear."""
    rule = summed(call)
    rule.partial = []
    return rule


def _resized(call: Call, dims: list[int]) -> OpRule:
    """The given dimensions are whole and new; the others pass."""
    out = list(call.x.dims)
    for d in dims:
        out[d] = new_axis(call.results[0].shape[d])
    whole = [*_axes_along(call, dims), *(t for d in dims for t in out[d])]
    return OpRule([out] * len(call.results), whole=whole)


def topk(call: Call) -> OpRule | None:
    return _resized(call, [call.dim()]) if call.x.shape else None


def diff(call: Call) -> OpRule | None:
    return _resized(call, [call.dim()]) if len(call.operands) == 1 else None


def pad(call: Call) -> OpRule:
    """Pads come in pairs, from the last dimension on; a pair may leave the size as it was."""
    before, after, last = call["pad"][::2], call["pad"][1::2], len(call.x.shape) - 1
    pairs = zip(before, after, strict=True)
    return _resized(call, [last - i for i, pair in enumerate(pairs) if any(pair)])


def loss(call: Call) -> OpRule | None:
    """Elementwise losses with a ``reduction`` (0 none, 1 mean, 2 sum)."""
    x, target = call.operands[:2]
    if x.shape != target.shape or len(call.operands) > 2:
        return None
    stuck = [t for a, b in zip(x.dims, target.dims, strict=True) for t in unify(a, b)]
    if call["reduction"] == 0:
        return OpRule([x.dims], whole=stuck)
    rule = OpRule([[]], whole=stuck, contracted=whole_terms(x.dims))
    rule.average = call["reduction"] == 1
    return rule
