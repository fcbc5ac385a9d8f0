"""Rules of ops over the last dimensions of images and signals: batch and channels pass."""

from __future__ import annotations

from graphpar.axes import TermDims, fresh, unify
from graphpar.passes.rules.call import Call, OpRule, Rule
from graphpar.passes.rules.einsum import new_axis, whole_terms
from graphpar.passes.rules.nn import convolution


def resized(count: int, *, linear: bool = False) -> Rule:
    """Pooling and interpolation: the last ``count`` dimensions are whole, the others pass."""

    def rule(call: Call) -> OpRule | None:
        lead = len(call.x.shape) - count
        results: list[TermDims] = []
        for result in call.results:
            if result.shape[:lead] != call.x.shape[:lead]:
                return None
            results.append([*call.x.dims[:lead], *fresh(result.shape[lead:])])
        whole = [
            *whole_terms(call.x.dims[lead:]),
            *(t for r in results for t in whole_terms(r[lead:])),
        ]
        return OpRule(results, whole=whole, partial=[{0}] if linear else [])

    return rule


def images(call: Call) -> OpRule:
    """``im2col``: only the batch of images passes."""
    lead = len(call.x.shape) - 3
    out = [*call.x.dims[:lead], *fresh(call.results[0].shape[lead:])]
    whole = whole_terms([*call.x.dims[lead:], *out[lead:]])
    return OpRule([out], whole=whole, partial=[{0}])


def grid_sampler(call: Call) -> OpRule:
    """Batch, channels and the grid's points pass; the image is whole, and linear."""
    x, grid = call["input"], call["grid"]
    whole = whole_terms([*x.dims[2:], grid.dims[-1]])
    whole += unify(x.dims[0], grid.dims[0])
    return OpRule([[*x.dims[:2], *grid.dims[1:-1]]], whole=whole, partial=[{x.index}])


def pixel_shuffle(call: Call) -> OpRule:
    """Channels (c, a, b) and pixels (h, w) become channels c and pixels ((h, a), (w, b))."""
    *lead, channels, rows, columns = call.x.dims
    factor = call["upscale_factor"]
    kept, a, b = fresh([call.results[0].shape[-3], factor, factor])
    whole = unify(channels, [*kept, *a, *b])
    out = [*lead, kept, [*rows, *a], [*columns, *b]]
    return OpRule([out], whole=[*whole, *a, *b], partial=[{0}])


def pixel_unshuffle(call: Call) -> OpRule:
    """The inverse of :func:`pixel_shuffle`."""
    *lead, channels, rows, columns = call.x.dims
    factor, (*_, height, width) = call["downscale_factor"], call.results[0].shape
    h, w, a, b = fresh([height, width, factor, factor])
    whole = [*unify(rows, [*h, *a]), *unify(columns, [*w, *b])]
    out = [*lead, [*channels, *a, *b], h, w]
    return OpRule([out], whole=[*whole, *a, *b], partial=[{0}])


def channel_shuffle(call: Call) -> OpRule:
    return OpRule([call.x.dims], whole=list(call.x.dims[1]), partial=[{0}])


def group_norm(call: Call) -> OpRule:
    """``native_group_norm``: channels are (group, channel of the group); batch and groups pass."""
    batch, channels, *pixels = call.x.dims
    group, inner = fresh([call["group"], call.x.shape[1] // call["group"]])
    whole = [*whole_terms(pixels), *inner, *unify(channels, [*group, *inner])]
    for name in ("weight", "bias"):
        if call.get(name) is not None:
            whole += unify(channels, call[name].dims[0])
    return OpRule(
        [call.x.dims, [batch, group], [batch, group]],
        whole=whole,
        local={
            "N": lambda inputs, _: inputs[0][0],
            "C": lambda inputs, _: inputs[0][1],
            "group": lambda _, results: results[1][1],
        },
    )


def general_convolution(call: Call) -> OpRule | None:
    """``convolution``, transposed (then without groups) or not: batch and output channels pass,
    input channels are contracted unless there is a bias."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if call["groups"] != 1:
        return None if call["transposed"] else convolution(call)
    spatial = len(weight.shape) - 2
    out = fresh(call.results[0].shape[-spatial:])
    ins, outs = weight.dims[:2] if call["transposed"] else weight.dims[1::-1]
    whole = whole_terms([*x.dims[-spatial:], *out, *weight.dims[2:]])
    whole += unify(x.dims[-spatial - 1], ins)
    if bias is not None:
        whole += [*unify(outs, bias.dims[0]), *ins]
    return OpRule(
        [[*x.dims[: -spatial - 1], outs, *out]],
        whole=whole,
        contracted=list(ins),
        partial=[{x.index}, {weight.index}] if bias is None else [],
    )


def fourier(call: Call) -> OpRule:
    """Along the transformed dimensions it is whole; others pass."""
    dims = {d % len(call.x.shape) for d in call["dim"]}
    out = list(call.x.dims)
    for d in dims:
        out[d] = new_axis(call.results[0].shape[d])
    whole = whole_terms([*(call.x.dims[d] for d in dims), *(out[d] for d in dims)])
    return OpRule([out], whole=whole, partial=[{0}])
