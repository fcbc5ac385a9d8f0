"""Rules of ops that look elements up by index."""

from __future__ import annotations

import torch

from graphpar.axes import TermDim, fresh, unify
from graphpar.passes.rules.call import Call, Operand, OpRule, broadcast
from graphpar.passes.rules.einsum import new_axis, whole_terms


def embedding(call: Call) -> OpRule:
    """A rank that holds some rows of the table looks up those: the result is Partial.

    Not where the gradient is scaled by how often all ids occur, or sparse.
    """
    weight, indices = call["weight"], call["indices"]
    rule = OpRule([[*indices.dims, weight.dims[1]]], partial=[{weight.index}])
    if call.get("scale_grad_by_freq"):
        rule.whole = [*weight.dims[0], *whole_terms(indices.dims)]
    elif call.get("sparse"):
        rule.whole = list(weight.dims[0])
    else:
        rule.contracted, rule.own = list(weight.dims[0]), [0]
    return rule


def embedding_bag(call: Call) -> OpRule | None:
    """Sums, means or maxima of rows: the columns of the table pass."""
    if call["sparse"] or call["scale_grad_by_freq"]:
        return None
    columns = call["weight"].dims[1]
    results = [fresh(r.shape) for r in call.results]
    for result, spec in zip(results, call.results, strict=True):
        if len(spec.shape) == 2:  # the bags, and the places of maxima
            result[1] = columns
    whole = whole_terms([*call["weight"].dims[:1], *(d for o in call.operands[1:] for d in o.dims)])
    return OpRule(results, whole=whole)


def gather(call: Call) -> OpRule | None:
    """A rank that holds some elements along ``dim`` looks up those: the result is Partial. Other
    dimensions are tied where sizes agree."""
    if not call.x.shape:
        return None
    x, index, dim = call.x, call["index"], call.dim()
    whole: TermDim = []
    for d, (mine, other) in enumerate(zip(x.dims, index.dims, strict=True)):
        if d != dim:
            same = x.shape[d] == index.shape[d]
            whole += unify(mine, other) if same else [*mine, *other]
    along = list(x.dims[dim])
    return OpRule([index.dims], whole=whole, contracted=along, own=[dim], partial=[{x.index}])


def index_select(call: Call) -> OpRule | None:
    if not call.x.shape:
        return None
    x, index, dim = call.x, call["index"], call.dim()
    out = list(x.dims)
    out[dim] = index.dims[0] if index.dims else []
    return OpRule([out], whole=list(x.dims[dim]), partial=[{x.index}])


def index(call: Call) -> OpRule | None:
    """``x[i, j, …]`` with integer tensors: indexed dimensions are whole, the broadcast index
    takes their place (or comes first, if they are apart)."""
    x: Operand = call.x
    indices: list[Operand | None] = list(call["indices"])
    given = [i for i, v in enumerate(indices) if v is not None]
    tensors = [v for v in indices if v is not None]
    if any(v.spec.dtype in (torch.bool, torch.uint8) for v in tensors):
        return None
    spread, stuck = broadcast(tensors)
    before, after = _around(given, len(x.shape))
    dims = [x.dims[d] for d in before], [x.dims[d] for d in after]
    whole = [*stuck, *(t for i in given for t in x.dims[i])]
    return OpRule([[*dims[0], *spread, *dims[1]]], whole=whole, partial=[{x.index}])


def _around(given: list[int], rank: int) -> tuple[list[int], list[int]]:
    """The other dimensions before and after those of the broadcast index."""
    rest = [d for d in range(rank) if d not in given]
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    return [d for d in rest if d < first], [d for d in rest if d >= first]


def scatter(call: Call) -> OpRule:
    """Writes along ``dim``: whole there; other dimensions are tied where sizes agree."""
    dim, whole = call.dim(), []
    for operand in call.operands[1:]:
        whole += _tie_where_equal(call.x, operand, dim)
    linear = "src" in call.named and "reduce" not in call.named
    return OpRule([call.x.dims], whole=whole, partial=[{0, call["src"].index}] if linear else [])


def index_put(call: Call) -> OpRule | None:
    """``x[i, j, …] = values`` with integer tensors: what is indexed is whole, and so is the index;
    the values broadcast to ``x[i, j, …]``, and have its other dimensions."""
    x, indices, values = call["self"], list(call["indices"]), call["values"]
    given = [i for i, v in enumerate(indices) if v is not None]
    tensors = [v for v in indices if v is not None]
    if any(v.spec.dtype in (torch.bool, torch.uint8) for v in tensors):
        return None
    before, after = _around(given, len(x.shape))
    spread = max(len(v.shape) for v in tensors)
    whole = whole_terms([*(x.dims[d] for d in given), *(d for v in tensors for d in v.dims)])
    places = [*before, *[None] * spread, *after]
    for offset in range(1, len(values.shape) + 1):
        place, other = places[-offset], values.dims[-offset]
        if place is None:
            whole += other
        elif x.shape[place] == values.shape[-offset]:
            whole += unify(x.dims[place], other)
    return OpRule([x.dims], whole=whole, partial=[{x.index, values.index}])


def index_fill(call: Call) -> OpRule:
    whole = whole_terms([*call.x.dims, *call["index"].dims]) if not call.x.shape else []
    if call.x.shape:
        whole = [*call.x.dims[call.dim()], *whole_terms(call["index"].dims)]
    value = call["value"]
    linear = [{call.x.index, value.index}] if isinstance(value, Operand) else []
    return OpRule([call.x.dims], whole=whole, partial=linear)


def index_add(call: Call) -> OpRule | None:
    """``index_add`` and ``index_copy``."""
    x, index, source, dim = call.x, call["index"], call["source"], call.dim()
    if len(source.shape) != len(x.shape) or not x.shape:
        return None
    whole = [*_tie_where_equal(x, source, dim), *whole_terms(index.dims)]
    return OpRule([x.dims], whole=whole, partial=[{x.index, source.index}])


def _tie_where_equal(x: Operand, other: Operand, dim: int) -> TermDim:
    """Unify dimensions of equal size but ``dim``; returns the terms that must be whole."""
    whole: TermDim = []
    for d, (mine, theirs) in enumerate(zip(x.dims, other.dims, strict=True)):
        same = d != dim and x.shape[d] == other.shape[d]
        whole += unify(mine, theirs) if same else [*mine, *theirs]
    return whole


def segment_scatter(call: Call) -> OpRule:
    """``slice_scatter`` and ``select_scatter``: whole along ``dim``, tied elsewhere."""
    dim, source = call.dim(), call.operands[1]
    others = [d for i, d in enumerate(call.x.dims) if i != dim]
    ranks_differ = len(source.dims) != len(call.x.dims)
    mine = source.dims if ranks_differ else [d for i, d in enumerate(source.dims) if i != dim]
    whole = list(call.x.dims[dim]) + ([] if ranks_differ else list(source.dims[dim]))
    for a, b in zip(others, mine, strict=True):
        whole += unify(a, b)
    return OpRule([call.x.dims], whole=whole, partial=[{0, 1}])


def one_hot(call: Call) -> OpRule | None:
    if call["num_classes"] == -1:
        return None
    classes = new_axis(call.results[0].shape[-1])
    return OpRule([[*call.x.dims, classes]], whole=classes)


def bucketize(call: Call) -> OpRule:
    """Each element is looked up among sorted boundaries, which are whole."""
    return OpRule([call["self"].dims], whole=whole_terms(call["boundaries"].dims))


def searchsorted(call: Call) -> OpRule | None:
    if len(call["sorted_sequence"].shape) != 1 or call.get("sorter") is not None:
        return None
    return OpRule([call["self"].dims], whole=whole_terms(call["sorted_sequence"].dims))


def isin(call: Call) -> OpRule:
    """The elements pass, what they are compared with is whole."""
    return OpRule([call["elements"].dims], whole=whole_terms(call["test_elements"].dims))
