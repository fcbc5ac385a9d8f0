"""Random steps: drawers by weight, layers of them, and what they sit between."""

from __future__ import annotations

from tests.property import program_drawers as drawers
from tests.property.program_draft import Draft
from tests.property.program_indexing import Indexed, InPlace, Running
from tests.property.program_layers import ACTIVATIONS, Norm
from tests.property.program_nets import Body, Step
from tests.property.program_parts import Shaped

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
REPEATABLE = (
    "linear",
    "norm",
    "mlp",
    "attention",
    "packed",
    "lora",
    "layers",
    "vector",
    "experts",
    "einsum",
    "image",
    "kept",
)


def _again(d: Draft) -> Step | None:
    """An earlier part on values with the last dimensions of those it had."""
    if not d.net.body.steps:
        return None
    number = d.pick.number(0, len(d.net.body.steps) - 1)
    step = d.net.body.steps[number]
    if step.part not in REPEATABLE:
        return None
    shapes = [d.values[i].shape for i in step.inputs]
    exact = step.part in ("attention", "layers", "vector", "einsum", "image", "kept")
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
    parts: list[drawers.Drawer] = (
        [drawers.attention, drawers.mlp] if x.dim() == 3 else [drawers.mlp]
    )
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


DRAWERS: tuple[tuple[int, drawers.Drawer], ...] = (
    (6, drawers.linear),
    (3, drawers.mlp),
    (4, drawers.attention),
    (5, _layers),
    (3, drawers.packed),
    (3, drawers.norm),
    (4, drawers.activation),
    (5, drawers.pair),
    (2, drawers.addition),
    (3, drawers.embedding),
    (14, drawers.shaped),
    (4, drawers.join),
    (2, drawers.loss),
    (1, drawers.pair_loss),
    (4, _again),
    (2, _tied),
    (1, drawers.lora),
    (1, drawers.product),
    (1, drawers.vector),
    (1, drawers.dropout),
    (6, drawers.padded),
    (1, drawers.conv),
    (3, drawers.image),
    (2, drawers.signal),
    (4, drawers.running),
    (4, drawers.indexed),
    (3, drawers.in_place),
    (2, drawers.kept),
    (3, drawers.experts),
    (3, drawers.einsum),
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
        Step("running", (), {"form": d.pick.one(tuple(Running.FORMS)), "dim": -1}),
        Step("indexed", (), {"form": d.pick.one(Indexed.FORMS), "dim": -1}),
        Step("in_place", (), {"form": d.pick.one(InPlace.FORMS), "dim": -1}),
    )
    if d.try_add(drawers.linear(d)):
        added = len(d.values) - 1
        filling = d.pick.one(fillings)
        d.try_add(Step(filling.part, (added,), filling.options))
        if d.values[-1].is_floating_point() and d.values[-1].dim():
            d.try_add(Step("linear", (len(d.values) - 1,), {"out": d.size()}))
