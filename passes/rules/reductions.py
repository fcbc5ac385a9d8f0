"""Rules of ops that combine or order the elements along some dimensions."""

from __future__ import annotations

from typing import Any

from graphpar.axes import TermDim, TermDims, unify
from graphpar.passes.rules.call import Call, OpRule, broadcast
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


def log_softmax(call: Call) -> OpRule:
    """Shards of the axis exchange their maximum and the sum of exponentials."""
    dims = _reduced(call)
    return OpRule([call.x.dims], reduced=_axes_along(call, dims), own=dims)


def cumulative(call: Call) -> OpRule:
    rule = norm_like(call)
    rule.partial = [{0}]
    return rule


def flip(call: Call) -> OpRule:
    """The flipped dimensions are whole, the others pass."""
    dims = [d % max(len(call.x.shape), 1) for d in call["dims"]]
    return OpRule([call.x.dims], whole=_axes_along(call, dims), partial=[{0}])


def roll(call: Call) -> OpRule:
    """Without dimensions it rolls the flat tensor."""
    dims = [d % max(len(call.x.shape), 1) for d in call["dims"]] or range(len(call.x.shape))
    return OpRule([call.x.dims], whole=_axes_along(call, list(dims)), partial=[{0}])


def norm(call: Call) -> OpRule:
    """Sums of magnitudes contract; other norms are of the whole."""
    power = call.named.get("ord", call.named.get("p"))
    return counted(call) if power == 1 else reduced_whole(call)


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
    """Along ``dim`` all is whole, what is put before or after ``x`` too."""
    if not call["n"]:  # then the others are ignored
        return OpRule([call.x.dims], partial=[{0}]) if len(call.operands) == 1 else None
    dim, rule = call.dim(), _resized(call, [call.dim()])
    for other in call.operands[1:]:
        rule.whole += other.dims[dim]
        for d, (mine, theirs) in enumerate(zip(call.x.dims, other.dims, strict=True)):
            rule.whole += unify(mine, theirs) if d != dim else []
    rule.partial = [set(range(len(call.operands)))]
    return rule


def pad(call: Call) -> OpRule:
    """Pads come in pairs, from the last dimension on; a pair may leave the size as it was. Addends
    may be padded with zeros, or with themselves."""
    before, after, last = call["pad"][::2], call["pad"][1::2], len(call.x.shape) - 1
    pairs = zip(before, after, strict=True)
    rule = _resized(call, [last - i for i, pair in enumerate(pairs) if any(pair)])
    filled = call.get("mode", "constant") == "constant" and max(call["pad"], default=0) > 0
    rule.partial = [] if filled and call.get("value", 0) else [{0}]
    return rule


def loss(call: Call) -> OpRule:
    """Elementwise losses, of operands that broadcast, with a ``reduction`` (0 none, 1 mean, 2
    sum)."""
    dims, stuck = broadcast(call.operands)
    if call["reduction"] == 0:
        return OpRule([dims], whole=stuck)
    rule = OpRule([[]], whole=stuck, contracted=whole_terms(dims))
    rule.average = call["reduction"] == 1
    return rule
