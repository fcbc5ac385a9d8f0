"""Random steps: each drawer proposes a part for the values that a network has so far."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.property.program_draft import Draft
from tests.property.program_layers import ACTIVATIONS, Attention, Linear, Norm, Packed
from tests.property.program_nets import Body, Step
from tests.property.program_parts import Pair, PairLoss, Shaped, Vector

# What needs its dimension whole, or sums over it.
WHOLE = (
    "softmax",
    "cumsum",
    "amax",
    "mean",
    "sum_kept",
    "logsumexp",
    "topk",
    "flip",
    "var",
    "roll",
)
REPEATABLE = ("linear", "norm", "mlp", "attention", "packed", "lora", "layers", "vector")


Drawer = Callable[[Draft], Step | None]


def _linear(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    out = d.values[i].shape[-1] if d.rarely(3) else d.size()
    form = d.pick.one(("module", *Linear.FORMS))
    return Step("linear", (i,), {"out": out, "bias": not d.rarely(3), "form": form})


def _packed(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    if d.rarely(3):
        sizes = tuple(d.size() for _ in range(d.pick.number(2, 3)))
    else:
        sizes = (d.size(),) * d.pick.number(2, 3)
    return Step("packed", (i,), {"sizes": sizes, "form": d.pick.one(Packed.FORMS)})


def _norm(d: Draft) -> Step | None:
    i = d.value()
    return None if i is None else Step("norm", (i,), {"form": d.pick.one(Norm.FORMS)})


def _activation(d: Draft) -> Step | None:
    i = d.value()
    name = d.pick.one(tuple(ACTIVATIONS))
    return None if i is None else Step("activation", (i,), {"name": name})


def _dropout(d: Draft) -> Step | None:
    i = d.value()
    return None if i is None else Step("dropout", (i,), {"p": d.pick.one((0.5, 0.1))})


def _broadcasting(d: Draft, i: int) -> int | None:
    """Another value that broadcasts with value ``i``, mostly of equal shape."""
    x = d.values[i]
    same = [j for j in d.floats() if d.values[j].shape == x.shape]
    if len(same) > 1 and d.pick.number(0, 4):
        return d.pick.one(same)
    found = [j for j in d.floats() if _broadcast(d.values[j], x)]
    return d.pick.one(found) if found else None


def _broadcast(x: Tensor, y: Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _pair(d: Draft) -> Step | None:
    i = d.value()
    j = None if i is None else _broadcasting(d, i)
    if i is None or j is None:
        return None
    form = d.pick.one(("add", "add", "add", *Pair.FORMS))
    return Step("pair", d.pick.one(((i, j), (j, i))), {"form": form})


def _sum(d: Draft) -> Step | None:
    i = d.value(2)
    same = [j for j in d.floats() if i is not None and d.values[j].shape == d.values[i].shape]
    if len(same) < 2:
        return None
    return Step("sum", tuple(d.pick.one(same) for _ in range(d.pick.number(2, 4))))


def embedding(d: Draft) -> Step | None:
    ids = [i for i, x in enumerate(d.values) if x.dtype == torch.int64 and 0 < x.dim() < 3]
    if not ids:
        return None
    i = d.pick.one(ids)
    vocabulary = max(d.size(), int(d.values[i].max()) + 1)
    positions = d.pick.one(("", "lookup", "slice", "expanded")) if d.values[i].dim() == 2 else ""
    options = {"vocabulary": vocabulary, "width": d.size(), "positions": positions}
    return Step("embedding", (i,), options)


def _lora(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    return Step("lora", (i,), {"out": d.size(), "rank": d.pick.number(1, 4)})


def _mlp(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    options = {
        "inner": d.size(),
        "activation": d.pick.one(tuple(ACTIVATIONS)),
        "gate": d.pick.one(("", "", "chunk", "split", "apart")),
        "bias": not d.rarely(3),
        "p": d.pick.one((0.0, 0.0, 0.0, 0.2)),
    }
    return Step("mlp", (i,), options)


def _attention(d: Draft) -> Step | None:
    i = d.value(3, 3)
    if i is None:
        return None
    group = d.pick.one((1, 1, 1, 2, 3, 4))
    kv_heads = d.pick.one((d.tp, d.tp, 2 * d.tp, 1, 2, 3, 8))
    heads = kv_heads * group
    if heads > 12 and d.tp < 8:
        heads = kv_heads
    others = [j for j in d.floats(3, 3) if d.values[j].shape[0] == d.values[i].shape[0]]
    inputs = (i, d.pick.one(others)) if d.rarely(6) else (i,)
    options = {
        "heads": heads,
        "kv_heads": kv_heads,
        "d": d.pick.one((2, 4, 1, 3)),
        "core": d.pick.one(Attention.CORES),
        "projection": d.pick.one(Attention.PROJECTIONS),
        "group": d.pick.one(Attention.GROUPS),
        "view": d.pick.one(Attention.VIEWS),
        "norm": d.pick.one(("", "", "rms", "by_hand", "layer")),
        "rotary": d.pick.one(("", "", "half", "complex")),
        "bias": not d.rarely(3),
        "p": d.pick.one((0.0, 0.0, 0.0, 0.0, 0.2)),
    }
    return Step("attention", inputs, options)


def _loss(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    shape = d.values[i].shape[:-1]
    ids = [j for j, v in enumerate(d.values) if v.dtype == torch.int64 and v.shape == shape]
    inputs = (i, d.pick.one(ids)) if ids and d.pick.flag() else (i,)
    options = {
        "reduction": d.pick.one(("mean", "sum", "none")),
        "smoothing": d.pick.one((0.0, 0.0, 0.1)),
        "ignore": d.rarely(3),
        "weighted": d.rarely(3),
        "layout": d.pick.one(("flat", "flat", "middle")),
    }
    return Step("loss", inputs, options)


def _pair_loss(d: Draft) -> Step | None:
    i = d.value()
    same = [j for j in d.floats() if i is not None and d.values[j].shape == d.values[i].shape]
    if i is None or not same:
        return None
    reduction = d.pick.one(("mean", "sum", "none"))
    options = {"form": d.pick.one(PairLoss.FORMS), "reduction": reduction}
    return Step("pair_loss", (i, d.pick.one(same)), options)


def _shaped(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    dim = -d.pick.number(1, d.values[i].dim())
    n = d.pick.one((1, 2, 3, d.tp))
    return Step("shaped", (i,), {"form": d.pick.one(tuple(Shaped.FORMS)), "dim": dim, "n": n})


def _join(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    x = d.values[i]
    dim = -d.pick.number(1, x.dim())
    form = d.pick.one(("cat", "cat", "stack"))

    def rest(y: Tensor) -> list[int]:
        sizes = list(y.shape)
        if form == "cat":
            sizes[dim] = 0
        return sizes

    found = [j for j in d.floats(x.dim(), x.dim()) if rest(d.values[j]) == rest(x)]
    inputs = (i, *(d.pick.one(found) for _ in range(d.pick.number(1, 2))))
    return Step("join", inputs, {"form": form, "dim": dim})


def _product(d: Draft) -> Step | None:
    i = d.value(2, 4)
    if i is None:
        return None
    x = d.values[i]
    found = [
        j
        for j in d.floats(2, 4)
        if d.values[j].shape[-1] == x.shape[-1]
        and _broadcast(d.values[j].flatten(-2).select(-1, 0), x.flatten(-2).select(-1, 0))
    ]
    return Step("product", (i, d.pick.one(found))) if found else None


def _vector(d: Draft) -> Step | None:
    i = d.value()
    return None if i is None else Step("vector", (i,), {"form": d.pick.one(Vector.FORMS)})


def _conv(d: Draft) -> Step | None:
    i = d.value(3, 3)
    if i is None:
        return None
    groups = d.pick.one((1, d.values[i].shape[-1]))
    out = d.size() if groups == 1 else groups * d.pick.number(1, 2)
    options = {"out": out, "kernel": d.pick.number(1, 3), "groups": groups}
    return Step("conv", (i,), options)


def _again(d: Draft) -> Step | None:
    """An earlier part on values with the last dimensions of those it had."""
    if not d.net.body.steps:
        return None
    number = d.pick.number(0, len(d.net.body.steps) - 1)
    step = d.net.body.steps[number]
    if step.part not in REPEATABLE:
        return None
    shapes = [d.values[i].shape for i in step.inputs]
    exact = step.part in ("attention", "layers", "vector")
    choices = [
        [
            j
            for j in d.floats()
            if (d.values[j].shape == s if exact else d.values[j].shape[-1] == s[-1])
        ]
        for s in shapes
    ]
    if not all(choices):
        return None
    return Step("again", tuple(d.pick.one(c[::-1]) for c in choices), {"step": number})


def _tied(d: Draft) -> Step | None:
    steps = [k for k, s in enumerate(d.net.body.steps) if s.part == "embedding"]
    if not steps:
        return None
    k = d.pick.one(steps)
    width = d.net.body.steps[k].options["width"]
    found = [i for i in d.floats() if d.values[i].shape[-1] == width]
    return Step("tied", (d.pick.one(found[::-1]),), {"step": k}) if found else None


def _layers(d: Draft) -> Step | None:
    """Pre-norm, post-norm or plain layers, of random steps, that keep the shape of ``x``."""
    i = d.value(2, 3)
    if i is None or d.depth > 0:
        return None
    others = d.floats()
    inputs = (i, d.pick.one(others)) if d.rarely(4) else (i,)
    layer = Draft(d.pick, d.tp, [d.values[j] for j in inputs], depth=1)
    outputs = layer_of(layer)
    if outputs is None:
        return None
    body = Body(layer.net.body.steps, outputs, layer.net.body.named)
    options = {
        "body": body,
        "count": d.pick.number(1, 3),
        "shared": d.rarely(4),
        "named": d.rarely(4),
    }
    return Step("layers", inputs, options)


def layer_of(d: Draft) -> tuple[int, ...] | None:
    """Fill a layer; the numbers of its results, the first of the shape of input 0."""
    x, kind = d.values[0], d.pick.one(("pre", "parallel", "post", "plain", "random"))
    top = 0
    parts: list[Drawer] = [_attention, _mlp] if x.dim() == 3 else [_mlp]
    if kind == "random":
        grow(d, d.pick.number(1, 5))
        top = d.floats()[-1]
        top = _restored(d, top)
    elif kind == "parallel":
        d.try_add(Step("norm", (0,), {"form": d.pick.one(Norm.FORMS)}))
        branches, source = [0], len(d.values) - 1
        for part in parts:
            step = part(d)
            if step is not None and d.try_add(_moved(step, source)):
                branches.append(len(d.values) - 1)
        if len(branches) == 1 or not d.try_add(Step("sum", tuple(branches))):
            return None
        top = len(d.values) - 1
    else:
        for part in parts:
            stream = top
            if kind == "pre":
                d.try_add(Step("norm", (stream,), {"form": d.pick.one(Norm.FORMS)}))
            step = part(d)
            if step is None or not d.try_add(_moved(step, len(d.values) - 1)):
                continue
            if kind != "plain":
                d.try_add(Step("pair", (stream, len(d.values) - 1), {"form": "add"}))
            if kind == "post":
                d.try_add(Step("norm", (len(d.values) - 1,), {"form": d.pick.one(Norm.FORMS)}))
            top = len(d.values) - 1
    if d.values[top].shape != x.shape or top == 0:
        return None
    extra = [j for j in d.floats() if j > 1 and j != top]
    return (top, d.pick.one(extra)) if extra and d.rarely(6) else (top,)


def _moved(step: Step, source: int) -> Step:
    return Step(step.part, (source, *step.inputs[1:]), step.options, step.frozen)


def _restored(d: Draft, top: int) -> int:
    """Bring a value to the shape of input 0 by a projection, where that can do it."""
    x = d.values[0]
    if d.values[top].shape != x.shape and d.values[top].shape[:-1] == x.shape[:-1]:
        d.try_add(Step("linear", (top,), {"out": x.shape[-1]}))
        top = len(d.values) - 1
    if d.values[top].shape == x.shape and d.pick.flag():
        d.try_add(Step("pair", (0, top), {"form": "add"}))
        top = len(d.values) - 1
    return top


DRAWERS: tuple[tuple[int, Drawer], ...] = (
    (6, _linear),
    (3, _mlp),
    (4, _attention),
    (5, _layers),
    (3, _packed),
    (3, _norm),
    (4, _activation),
    (5, _pair),
    (2, _sum),
    (3, embedding),
    (14, _shaped),
    (4, _join),
    (2, _loss),
    (1, _pair_loss),
    (4, _again),
    (2, _tied),
    (1, _lora),
    (1, _product),
    (1, _vector),
    (1, _dropout),
    (1, _conv),
)
_WEIGHTED = tuple(drawer for weight, drawer in DRAWERS for _ in range(weight))


def grow(d: Draft, steps: int) -> None:
    for _ in range(steps):
        if d.rarely(4):
            sandwich(d)
            continue
        step = d.pick.one(_WEIGHTED)(d)
        if step is not None and d.rarely(10):
            frozen = d.pick.one(("all", "weight", "bias"))
            step = Step(step.part, step.inputs, step.options, frozen)
        d.try_add(step)


def sandwich(d: Draft) -> None:
    """Something between two projections: the sharded axis, or addends, reach it."""
    form = d.pick.one(WHOLE if d.pick.flag() else tuple(Shaped.FORMS))
    fillings = (
        Step("shaped", (), {"form": form, "dim": -1, "n": d.pick.one((1, 2, d.tp))}),
        Step("activation", (), {"name": d.pick.one(tuple(ACTIVATIONS))}),
        Step("norm", (), {"form": d.pick.one(Norm.FORMS)}),
    )
    if d.try_add(_linear(d)):
        added = len(d.values) - 1
        filling = d.pick.one(fillings)
        d.try_add(Step(filling.part, (added,), filling.options))
        if d.values[-1].is_floating_point() and d.values[-1].dim():
            d.try_add(Step("linear", (len(d.values) - 1,), {"out": d.size()}))
