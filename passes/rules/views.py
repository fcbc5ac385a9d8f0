"""Rules of ops that rearrange elements: views, permutations, expansions."""

from __future__ import annotations

from graphpar.axes import TermDim, TermDims, flatten, fresh, segments, unify
from graphpar.passes.rules.call import Call, OpRule, Shape
from graphpar.passes.rules.einsum import new_axis, whole_terms

LINEAR = [{0}]


def _result_shape(_: list[Shape], results: list[Shape]) -> list[int]:
    return list(results[0])


def reshape(call: Call) -> OpRule:
    """Any reshape: split and merge axes by aligning sizes from the major end."""
    shape = call.results[0].shape
    out = fresh(shape)
    stuck = unify(whole_terms(call.x.dims), whole_terms(out))
    # What the shapes alone forbid stays whole, though the axes may be finer: a type must be
    # legal by the op alone, so that it can be verified.
    plain, plain_out = fresh(call.x.shape), fresh(shape)
    forbidden = flatten(unify(whole_terms(plain), whole_terms(plain_out)))
    for dim, alone in zip([*call.x.dims, *out], [*plain, *plain_out], strict=True):
        if any(term in forbidden for term in flatten(alone)):
            stuck += dim
    sizes = [n for n in ("size", "shape") if n in call.named]
    return OpRule([out], whole=stuck, partial=LINEAR, local=dict.fromkeys(sizes, _result_shape))


def squeeze(call: Call) -> OpRule:
    """A rank that holds one element of a dimension must not lose it: a list of dimensions is cut
    down to those of size 1; without one the others stay whole."""
    rule, rank = reshape(call), len(call.x.shape)
    given = call.get("dim", list(range(rank)))
    if "dim" in call.named and isinstance(given, list):
        ones = [d for d in given if rank and call.x.shape[d % rank] == 1]
        rule.local = {"dim": lambda *_: ones}
        return rule
    dims = given if isinstance(given, list) else [given]
    rule.whole += [t for d in dims if rank for t in call.x.dims[d % rank]]
    return rule


def unflatten(call: Call) -> OpRule:
    rule = reshape(call)
    dim, rank = call.dim(), len(call["sizes"])
    rule.local = {"sizes": lambda _, results: list(results[0][dim : dim + rank])}
    return rule


def permute(call: Call) -> OpRule:
    rank = len(call.x.shape)
    return OpRule([[call.x.dims[d % rank] for d in call["dims"]]], partial=LINEAR)


def transpose(call: Call) -> OpRule:
    dims = list(call.x.dims)
    if dims:
        i, j = call.dim("dim0"), call.dim("dim1")
        dims[i], dims[j] = dims[j], dims[i]
    return OpRule([dims], partial=LINEAR)


def reverse_dims(call: Call) -> OpRule:
    return OpRule([call.x.dims[::-1]], partial=LINEAR)


def expand(call: Call) -> OpRule:
    """A dimension of size 1 that grows gets a new axis, which the operand lacks."""
    shape = call.results[0].shape
    offset = len(shape) - len(call.x.shape)
    out: TermDims = []
    made: TermDim = []
    for index, size in enumerate(shape):
        kept = index >= offset and call.x.shape[index - offset] == size
        out.append(call.x.dims[index - offset] if kept else new_axis(size))
        made += [] if kept else out[-1]
    return OpRule([out], made=made, partial=LINEAR, local={"size": _result_shape})


def repeat(call: Call) -> OpRule:
    """Tiling by k: the dimension n becomes (k, n)."""
    offset = len(call["repeats"]) - len(call.x.shape)
    own: TermDims = [[] for _ in range(offset)] + list(call.x.dims)
    tiles = [new_axis(k) for k in call["repeats"]]
    out = [[*tile, *dim] for tile, dim in zip(tiles, own, strict=True)]
    return OpRule([out], whole=whole_terms(tiles), partial=LINEAR)


def repeat_interleave(call: Call) -> OpRule:
    """Repeating each element k times: the dimension n becomes (n, k); without a dimension, of the
    flat tensor."""
    copies, out = new_axis(int(call["repeats"])), list(call.x.dims)
    dim = 0
    if call["dim"] is None:
        out = [[*whole_terms(out), *copies]]
    else:
        dim = call.dim()
        out[dim] = [*out[dim], *copies]
    rule = OpRule([out], whole=copies, partial=LINEAR)
    if call["output_size"] is not None:
        rule.local = {"output_size": lambda _, results: results[0][dim]}
    return rule


def view_as_complex(call: Call) -> OpRule:
    """The last dimension holds real and imaginary parts."""
    return OpRule([call.x.dims[:-1]], whole=list(call.x.dims[-1]), partial=LINEAR)


def view_as_real(call: Call) -> OpRule:
    parts = new_axis(2)
    return OpRule([[*call.x.dims, parts]], whole=parts, partial=LINEAR)


def glu(call: Call) -> OpRule:
    """The first half of the dimension times the sigmoid of the second."""
    dim = call.dim()
    half = call.results[0].shape[dim]
    pieces = segments(call.x.dims[dim], [half, half])
    out = list(call.x.dims)
    if pieces is None:
        out[dim] = new_axis(half)
        return OpRule([out], whole=[*call.x.dims[dim], *out[dim]])
    out[dim] = pieces[0]
    return OpRule([out], whole=unify(*pieces))


def diagonal(call: Call) -> OpRule:
    """The two dimensions are whole and become one, the last."""
    rank = len(call.x.shape)
    taken = {call["dim1"] % rank, call["dim2"] % rank}
    line = new_axis(call.results[0].shape[-1])
    out = [*(d for i, d in enumerate(call.x.dims) if i not in taken), line]
    whole = [*line, *(t for i in taken for t in call.x.dims[i])]
    return OpRule([out], whole=whole, partial=LINEAR)


def diag_embed(call: Call) -> OpRule:
    """The last dimension is whole and becomes two."""
    shape = call.results[0].shape
    made = {call["dim1"] % len(shape), call["dim2"] % len(shape)}
    rest = iter(call.x.dims[:-1])
    out = [new_axis(size) if i in made else next(rest) for i, size in enumerate(shape)]
    whole = [*call.x.dims[-1], *(t for i in made for t in out[i])]
    return OpRule([out], whole=whole, partial=LINEAR)


def unfold(call: Call) -> OpRule | None:
    """The dimension is whole and becomes (window, element)."""
    if not call.x.shape:
        return None
    dim = call.dim("dimension")
    windows, elements = new_axis(call.results[0].shape[dim]), new_axis(call["size"])
    out = [*call.x.dims, elements]
    out[dim] = windows
    return OpRule([out], whole=[*call.x.dims[dim], *windows, *elements], partial=LINEAR)


def rot90(call: Call) -> OpRule:
    """A quarter turn flips one of the two dimensions and swaps them; the flipped one is whole."""
    rank, turns = len(call.x.shape), call["k"] % 4
    i, j = (d % rank for d in call["dims"])
    flipped = {0: [], 1: [j], 2: [i, j], 3: [i]}[turns]
    whole = [t for d in flipped for t in call.x.dims[d]]
    out = list(call.x.dims)
    if turns % 2:
        out[i], out[j] = out[j], out[i]
    return OpRule([out], whole=whole, partial=LINEAR)
