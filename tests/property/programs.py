"""Random programs: modules that wire random parts together, with inputs.

A :class:`Program` is plain data, so that a failing one can be pasted as an ``@example``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.property.program_parts import (
    ACTIVATIONS,
    PARTS,
    Attention,
    Linear,
    Norm,
    Packed,
    Pair,
    PairLoss,
    Shaped,
    Vector,
)

T = TypeVar("T")
MOST_ELEMENTS = 4096
RANKS = (1, 2, 2, 3, 4, 4, 8)


@dataclass(frozen=True)
class Step:
    """A part and the values it is called on, by number. Three parts are not in the table:
    "again" calls an earlier ``step`` once more, "tied" is a projection with the weight of an
    earlier ``step``, "layers" are ``count`` copies of a ``body`` (or one, called so often).

    ``frozen``: which parameters do not learn ("all", or those whose names end like that)."""

    part: str
    inputs: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    frozen: str = ""


@dataclass(frozen=True)
class Body:
    """Steps in order; values are numbered from the inputs on, as the steps make them."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    named: bool = False


@dataclass(frozen=True)
class Input:
    """``kind``: "grad" and "plain" are floating, "ids" are integers below 7, "mask" is bool."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    body: Body
    tp: int
    sp: bool = False
    seed: int = 0

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The module in train mode, and the arguments of one call."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            values = [make_input(each) for each in self.inputs]
            model = Model(self.body, values)
            randomise(model)
        names = [f"x{i}" for i in range(1, len(values))]
        return model.double().train(), (values[0],), dict(zip(names, values[1:], strict=True))


def make_input(given: Input) -> Tensor:
    if given.kind == "ids":
        return torch.randint(0, 7, given.shape)
    if given.kind == "mask":
        return torch.rand(given.shape) < 0.7
    return torch.randn(given.shape, dtype=torch.float64, requires_grad=given.kind == "grad")


def randomise(model: nn.Module) -> None:
    """Norm weights that are not ones, biases that are not zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


class Net(nn.Module):
    """Runs a :class:`Body`. Made step by step, each part for the values it gets."""

    def __init__(self, body: Body, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.body = Body((), (), body.named)
        self.parts: list[nn.Module] = []
        if not body.named:
            self.steps = nn.ModuleList()
        self.values = [value.detach() for value in inputs]
        for step in body.steps:
            self.add(step)
        self.body = Body(self.body.steps, body.outputs, body.named)
        self.values = []

    def add(self, step: Step) -> list[Tensor]:
        """Append a step; its results."""
        xs = [self.values[i] for i in step.inputs]
        part, shared = self._part(step, xs), "step" in step.options
        part.double()
        if step.frozen:
            for name, parameter in part.named_parameters():
                if step.frozen == "all" or name.endswith(step.frozen):
                    parameter.requires_grad_(False)
        with torch.no_grad():
            results = as_list(part(*xs))
        if step.part == "again":
            self.parts.append(part)
        elif self.body.named:
            setattr(self, f"{step.part}_{len(self.body.steps)}", part)
            self.parts.append(part)
        else:
            self.steps.append(part)
            self.parts.append(part)
        assert not shared or step.part in ("again", "tied")
        self.values += results
        self.body = Body((*self.body.steps, step), (), self.body.named)
        return results

    def _part(self, step: Step, xs: list[Tensor]) -> nn.Module:
        options = dict(step.options)
        if step.part == "again":
            return self.parts[options["step"]]
        if step.part == "layers":
            return Layers(xs, **options)
        if step.part == "tied":
            weight = self.parts[options["step"]].weight
            assert isinstance(weight, nn.Parameter)
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            head.weight = weight
            return head
        return PARTS[step.part](xs, **options)

    def forward(self, *inputs: Tensor) -> Any:
        values = list(inputs)
        for step, part in zip(self.body.steps, self.parts, strict=True):
            values += as_list(part(*[values[i] for i in step.inputs]))
        results = tuple(values[i] for i in self.body.outputs)
        return results if len(results) > 1 else results[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Net:
        """``parts`` stands for the children, which a copy has of its own."""
        import copy

        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


class Layers(nn.Module):
    """Layers in a row; what they give besides their first result is collected."""

    def __init__(
        self, xs: Sequence[Tensor], *, body: Body, count: int = 2, shared: bool = False,
        named: bool = False,
    ) -> None:
        super().__init__()
        made = [Net(body, xs) for _ in range(1 if shared else count)]
        self.order = [0] * count if shared else list(range(count))
        self.named = named
        if named:
            for number, layer in enumerate(made):
                setattr(self, f"layer_{'abc'[number]}", layer)
        else:
            self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        extras: list[Tensor] = []
        for number in self.order:
            layer = getattr(self, f"layer_{'abc'[number]}") if self.named else self.layers[number]
            x, *extra = as_list(layer(x, *rest))
            extras += extra
        return (x, *extras) if extras else x


class Model(nn.Module):
    """The outermost module: arguments by position and by name, outputs in a dict."""

    def __init__(self, body: Body, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.net = Net(body, inputs)

    def forward(
        self, x0: Tensor, x1: Tensor | None = None, x2: Tensor | None = None,
        x3: Tensor | None = None,
    ) -> dict[str, Tensor]:
        results = as_list(self.net(*[x for x in (x0, x1, x2, x3) if x is not None]))
        return {f"y{i}": value for i, value in enumerate(results)}


# --- the strategy -------------------------------------------------------------------------------


class Pick:
    """Random choices, as methods."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def one(self, choices: Sequence[T]) -> T:
        chosen: T = self._draw(st.sampled_from(choices))
        return chosen

    def int(self, low: int, high: int) -> int:
        number: int = self._draw(st.integers(low, high))
        return number

    def flag(self, one_in: int = 2) -> bool:
        """Seldom true, if ``one_in`` is large; shrinks to false."""
        return self.int(0, one_in - 1) == one_in - 1

    def size(self, tp: int) -> int:
        """Mostly what tp divides."""
        return tp * self.int(1, max(16 // tp, 2)) if self.int(0, 3) else self.int(1, 9)


Drawer = Callable[["Draft"], Step | None]


class Draft:
    """A network under construction."""

    def __init__(self, pick: Pick, tp: int, inputs: Sequence[Tensor], depth: int = 0) -> None:
        self.pick, self.tp, self.depth = pick, tp, depth
        self.net = Net(Body((), (), pick.flag(4)), [])
        self.net.values = [value.detach() for value in inputs]

    @property
    def values(self) -> list[Tensor]:
        return self.net.values

    def floats(self, low: int = 1, high: int = 5) -> list[int]:
        return [
            i for i, x in enumerate(self.values)
            if x.is_floating_point() and low <= x.dim() <= high
        ]

    def value(self, low: int = 1, high: int = 5) -> int | None:
        """A floating value, the newest half of the time."""
        found = self.floats(low, high)
        if not found:
            return None
        return found[-1] if self.pick.flag() else self.pick.one(found[::-1])

    def size(self) -> int:
        return self.pick.size(self.tp)

    def try_add(self, step: Step | None) -> bool:
        """Add a step if it runs, and its results are fit for the test."""
        if step is None:
            return False
        before = self.net.values
        self.net.values = list(before)
        count, body = len(self.net.parts), self.net.body
        try:
            results = self.net.add(step)
        except (RuntimeError, IndexError, ValueError, TypeError):
            results = []
        fits = bool(results) and all(fit(x) for x in results)
        if not fits and len(self.net.parts) > count:
            self.net.parts.pop()
            self.net.body = body
            if step.part != "again" and not body.named:
                del self.net.steps[-1]
        if not fits:
            self.net.values = before
        return fits


def fit(x: Tensor) -> bool:
    if not 0 < x.numel() <= MOST_ELEMENTS or x.dim() > 5:
        return False
    return not x.is_floating_point() or bool(x.isfinite().all() and x.abs().max() < 1e3)


def _linear(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    out = d.values[i].shape[-1] if d.pick.flag(3) else d.size()
    form = d.pick.one(("module", *Linear.FORMS))
    return Step("linear", (i,), {"out": out, "bias": not d.pick.flag(3), "form": form})


def _packed(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    if d.pick.flag(3):
        sizes = tuple(d.size() for _ in range(d.pick.int(2, 3)))
    else:
        sizes = (d.size(),) * d.pick.int(2, 3)
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
    if len(same) > 1 and d.pick.int(0, 4):
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
    return Step("sum", tuple(d.pick.one(same) for _ in range(d.pick.int(2, 4))))


def _embedding(d: Draft) -> Step | None:
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
    return Step("lora", (i,), {"out": d.size(), "rank": d.pick.int(1, 4)})


def _mlp(d: Draft) -> Step | None:
    i = d.value(2)
    if i is None:
        return None
    options = {
        "inner": d.size(),
        "activation": d.pick.one(tuple(ACTIVATIONS)),
        "gate": d.pick.one(("", "", "chunk", "split", "apart")),
        "bias": not d.pick.flag(3),
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
    inputs = (i, d.pick.one(others)) if d.pick.flag(6) else (i,)
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
        "bias": not d.pick.flag(3),
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
        "ignore": d.pick.flag(3),
        "weighted": d.pick.flag(3),
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
    dim = -d.pick.int(1, d.values[i].dim())
    n = d.pick.one((1, 2, 3, d.tp))
    return Step("shaped", (i,), {"form": d.pick.one(tuple(Shaped.FORMS)), "dim": dim, "n": n})


def _join(d: Draft) -> Step | None:
    i = d.value()
    if i is None:
        return None
    x = d.values[i]
    dim = -d.pick.int(1, x.dim())
    form = d.pick.one(("cat", "cat", "stack"))

    def rest(y: Tensor) -> list[int]:
        sizes = list(y.shape)
        if form == "cat":
            sizes[dim] = 0
        return sizes

    found = [j for j in d.floats(x.dim(), x.dim()) if rest(d.values[j]) == rest(x)]
    inputs = (i, *(d.pick.one(found) for _ in range(d.pick.int(1, 2))))
    return Step("join", inputs, {"form": form, "dim": dim})


def _product(d: Draft) -> Step | None:
    i = d.value(2, 4)
    if i is None:
        return None
    x = d.values[i]
    found = [
        j for j in d.floats(2, 4)
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
    out = d.size() if groups == 1 else groups * d.pick.int(1, 2)
    options = {"out": out, "kernel": d.pick.int(1, 3), "groups": groups}
    return Step("conv", (i,), options)


def _again(d: Draft) -> Step | None:
    """An earlier part on values with the last dimensions of those it had."""
    if not d.net.body.steps:
        return None
    number = d.pick.int(0, len(d.net.body.steps) - 1)
    step = d.net.body.steps[number]
    if step.part not in ("linear", "norm", "mlp", "attention", "packed", "lora", "layers", "vector"):
        return None
    shapes = [d.values[i].shape for i in step.inputs]
    exact = step.part in ("attention", "layers", "vector")
    choices = [
        [
            j for j in d.floats()
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
    inputs = (i, d.pick.one(others)) if d.pick.flag(4) else (i,)
    layer = Draft(d.pick, d.tp, [d.values[j] for j in inputs], depth=1)
    outputs = layer_of(layer)
    if outputs is None:
        return None
    body = Body(layer.net.body.steps, outputs, layer.net.body.named)
    options = {
        "body": body, "count": d.pick.int(1, 3), "shared": d.pick.flag(4),
        "named": d.pick.flag(4),
    }
    return Step("layers", inputs, options)


def layer_of(d: Draft) -> tuple[int, ...] | None:
    """Fill a layer; the numbers of its results, the first of the shape of input 0."""
    x, kind = d.values[0], d.pick.one(("pre", "parallel", "post", "plain", "random"))
    top = 0
    parts: list[Drawer] = [_attention, _mlp] if x.dim() == 3 else [_mlp]
    if kind == "random":
        grow(d, d.pick.int(1, 5))
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
    return (top, d.pick.one(extra)) if extra and d.pick.flag(6) else (top,)


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
    (3, _embedding),
    (8, _shaped),
    (3, _join),
    (2, _loss),
    (1, _pair_loss),
    (2, _again),
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
        step = d.pick.one(_WEIGHTED)(d)
        if step is not None and d.pick.flag(10):
            step = Step(step.part, step.inputs, step.options, d.pick.one(("all", "weight", "bias")))
        d.try_add(step)


@st.composite
def programs(draw: Any, *, most_steps: int = 9) -> Program:
    pick = Pick(draw)
    tp = pick.one(RANKS)
    batch = pick.one((2, 1, 3, 4))
    length = pick.one((tp, 2 * tp, 6, 1, 5, 12)) if tp < 8 else pick.one((8, 8, 5, 6))
    width = pick.size(tp)
    kinds = pick.one((("grad",), ("plain",), ("ids",), ("grad", "ids"), ("ids", "ids"),
                      ("plain", "grad"), ("grad", "vector"), ("ids", "grad", "grad")))
    inputs = []
    for kind in kinds:
        shape = (batch, length) if kind == "ids" else (batch, length, width)
        if kind == "vector":
            kind, shape = "grad", (width,)
        elif kind != "ids" and pick.flag(6):
            shape = pick.one(((batch, width), (batch * length, width), (batch, 1, width),
                              (width,), (1, length, width)))
        inputs.append(Input(kind, shape))
    seed = pick.int(0, 2**10)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        d = Draft(pick, tp, [make_input(each) for each in inputs])
        if kinds[0] == "ids":
            d.try_add(_embedding(d))
        grow(d, pick.int(1, most_steps))
        outputs = _outputs(d, len(inputs))
    body = Body(d.net.body.steps, outputs, d.net.body.named)
    return Program(tuple(inputs), body, tp, pick.flag(), seed)


def _outputs(d: Draft, inputs: int) -> tuple[int, ...]:
    """What nothing reads, and now and then something else."""
    read = {i for step in d.net.body.steps for i in step.inputs}
    own = range(inputs, len(d.values))
    leaves = [i for i in own if i not in read and not d.values[i].is_complex()]
    leaves = leaves[-4:]
    others = [i for i in own if i in read]
    if others and d.pick.flag(4):
        leaves.append(d.pick.one(others))
    return tuple(leaves) or (0,)


_ = math
