"""Drawers: each proposes one part for the values that a network has so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.property.program_attention import Attention, Padded
from tests.property.program_draft import Draft
from tests.property.program_experts import Einsum, Experts
from tests.property.program_images import Image, Signal
from tests.property.program_indexing import Indexed, InPlace, Kept, Running
from tests.property.program_layers import ACTIVATIONS, Embedding, Linear, Norm, Packed
from tests.property.program_losses import Loss, PairLoss
from tests.property.program_nets import Step
from tests.property.program_parts import Dropout, Pair, Shaped, Vector

Drawer = Callable[[Draft], Step | None]


def linear(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    out = d.values[i].shape[-1] if d.rarely(3) else d.size()
    form = d.pick.one(("module", *Linear.FORMS))
    return Step("linear", (i,), {"out": out, "bias": not d.rarely(3), "form": form})


def packed(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    if d.rarely(3):
        sizes = tuple(d.size() for _ in range(d.pick.number(2, 3)))
    else:
        sizes = (d.size(),) * d.pick.number(2, 3)
    return Step("packed", (i,), {"sizes": sizes, "form": d.pick.one(Packed.FORMS)})


def norm(d: Draft) -> Step | None:
    i = d.value()
    return None if i is None else Step("norm", (i,), {"form": d.pick.one(Norm.FORMS)})


def activation(d: Draft) -> Step | None:
    i = d.value()
    name = d.pick.one(tuple(ACTIVATIONS))
    return None if i is None else Step("activation", (i,), {"name": name})


def dropout(d: Draft) -> Step | None:
    i = d.value()
    options = {"p": d.pick.one((0.5, 0.1)), "form": d.pick.one(("plain", *Dropout.FORMS))}
    return None if i is None else Step("dropout", (i,), options)


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


def pair(d: Draft) -> Step | None:
    i = d.value()
    j = None if i is None else _broadcasting(d, i)
    if i is None or j is None:
        return None
    form = d.pick.one(("add", "add", "add", *Pair.FORMS))
    return Step("pair", d.pick.one(((i, j), (j, i))), {"form": form})


def addition(d: Draft) -> Step | None:
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
    positions = d.pick.one(("", *Embedding.POSITIONS)) if d.values[i].dim() == 2 else ""
    options = {
        "vocabulary": vocabulary,
        "width": d.size(),
        "positions": positions,
        "padding": d.pick.one((None, None, 0)),
        "scaled": d.rarely(3),
    }
    return Step("embedding", (i,), options)


def lora(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    return Step("lora", (i,), {"out": d.size(), "rank": d.pick.number(1, 4)})


def mlp(d: Draft) -> Step | None:
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


def attention(d: Draft) -> Step | None:
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
        "added": d.pick.one(("", "", "", *Attention.ADDED)),
        "cache": d.pick.one(("", "", "", "", "", *Attention.CACHES)),
    }
    return Step("attention", inputs, options)


def padded(d: Draft) -> Step | None:
    i = d.value(3, 3)
    masks = [
        j
        for j, mask in enumerate(d.values)
        if i is not None and mask.dtype == torch.bool and mask.shape == d.values[i].shape[:2]
    ]
    if i is None or not masks:
        return None
    options = {
        "form": d.pick.one(Padded.FORMS),
        "heads": d.pick.one((d.tp, 2 * d.tp, 1, 3)),
        "d": d.pick.one((1, 2, 4)),
    }
    return Step("padded", (i, d.pick.one(masks)), options)


def loss(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    shape = d.values[i].shape[:-1]
    ids = [j for j, v in enumerate(d.values) if v.dtype == torch.int64 and v.shape == shape]
    inputs = (i, d.pick.one(ids)) if ids and d.pick.flag() else (i,)
    options = {
        "reduction": d.pick.one(("mean", "sum", "none")),
        "smoothing": d.pick.one((0.0, 0.0, 0.1)),
        "form": d.pick.one(Loss.FORMS),
        "ignore": d.pick.one((False, False, True, "first")),
        "index": d.pick.one((-100, -100, 0, 1)),
        "weighted": d.rarely(3),
        "layout": d.pick.one(("flat", "flat", "middle")),
    }
    return Step("loss", inputs, options)


def pair_loss(d: Draft) -> Step | None:
    i = d.value()
    same = [j for j in d.floats() if i is not None and d.values[j].shape == d.values[i].shape]
    if i is None or not same:
        return None
    reduction = d.pick.one(("mean", "sum", "none"))
    options = {"form": d.pick.one(PairLoss.FORMS), "reduction": reduction}
    return Step("pair_loss", (i, d.pick.one(same)), options)


def shaped(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    dim = -d.pick.number(1, d.values[i].dim())
    n = d.pick.one((1, 2, 3, d.tp))
    return Step("shaped", (i,), {"form": d.pick.one(tuple(Shaped.FORMS)), "dim": dim, "n": n})


def join(d: Draft) -> Step | None:
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


def product(d: Draft) -> Step | None:
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


def vector(d: Draft) -> Step | None:
    i = d.value()
    return None if i is None else Step("vector", (i,), {"form": d.pick.one(Vector.FORMS)})


def conv(d: Draft) -> Step | None:
    i = d.value(3, 3)
    if i is None:
        return None
    groups = d.pick.one((1, d.values[i].shape[-1]))
    out = d.size() if groups == 1 else groups * d.pick.number(1, 2)
    options = {"out": out, "kernel": d.pick.number(1, 3), "groups": groups}
    return Step("conv", (i,), options)


def image(d: Draft) -> Step | None:
    i = d.value(3, 3)
    if i is None:
        return None
    length = d.values[i].shape[1]
    rows = d.pick.one([n for n in (1, 2, 3) if length % n == 0])
    options = {
        "form": d.pick.one(Image.FORMS),
        "rows": rows,
        "out": d.size(),
        "bias": not d.rarely(3),
    }
    return Step("image", (i,), options)


def signal(d: Draft) -> Step | None:
    i = d.value(3, 3)
    options = {"form": d.pick.one(Signal.FORMS), "out": d.size()}
    return None if i is None else Step("signal", (i,), options)


def _along(d: Draft, part: str, forms: Sequence[str]) -> Step | None:
    i = d.value()
    if i is None:
        return None
    dim = -d.pick.number(1, d.values[i].dim())
    return Step(part, (i,), {"form": d.pick.one(forms), "dim": dim})


def running(d: Draft) -> Step | None:
    return _along(d, "running", tuple(Running.FORMS))


def indexed(d: Draft) -> Step | None:
    return _along(d, "indexed", Indexed.FORMS)


def in_place(d: Draft) -> Step | None:
    return _along(d, "in_place", InPlace.FORMS)


def kept(d: Draft) -> Step | None:
    i = d.value(2)
    return None if i is None else Step("kept", (i,), {"form": d.pick.one(Kept.FORMS)})


def experts(d: Draft) -> Step | None:
    i = d.value(2, 4)
    if i is None:
        return None
    options = {
        "form": d.pick.one(Experts.FORMS),
        "count": d.pick.one((d.tp, 2, 4, 3)),
        "inner": d.size(),
        "top": d.pick.number(1, 3),
        "normed": d.pick.flag(),
    }
    return Step("experts", (i,), options)


def einsum(d: Draft) -> Step | None:
    i = d.value(3, 3)
    if i is None:
        return None
    options = {
        "form": d.pick.one(tuple(Einsum.FORMS)),
        "inner": d.size(),
        "count": d.pick.one((d.tp, 1, 2, 3)),
    }
    return Step("einsum", (i,), options)
