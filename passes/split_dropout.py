"""split_dropout: every op that drops elements as products, sums and the one plain dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphpar.passes.normalize import attention_with_dropout
from graphpar.program import Program, TensorSpec, copy_graph, derive, info, is_getitem
from graphpar.program import tensor_spec as spec_of

NAME = "split-dropout"
aten = torch.ops.aten
# What selu makes of minus infinity, negated: torch.nn.functional.alpha_dropout.
_ALPHA = 1.7580993408473766


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDropout:
    pass


def split_dropout(program: Program, options: SplitDropout = SplitDropout()) -> Program:
    """Let ``aten.dropout`` stand alone wherever a model drops elements.

    Attention with dropout becomes products, softmax and dropout; dropout of whole channels a
    product with a dropout of ones; alpha dropout (Klambauer et al. 2017, section 3) is
    ``a (dropout(x + c) (1 - p) - c) + a c p``. Dropout between the layers of ``aten.lstm`` and its
    kin stays inside. Needs: traced or outlined graphs. Ensures: the same distribution, on the CPU
    from the same random numbers. Numerics: reassociates.
    """
    if not any(_splits(node) for _, graph in program.graphs() for node in graph.nodes):
        return program
    graphs = {}
    for name, graph in program.graphs():
        graphs[name], _ = copy_graph(graph)
        for node in list(graphs[name].nodes):
            if _splits(node):
                with graphs[name].inserting_before(node):
                    _REWRITES[node.target](graphs[name], node)
    return program.with_graphs(graphs)


def _splits(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _REWRITES:
        return False
    named = _named(node)
    p: float = named["dropout_p"] if "dropout_p" in named else named["p"]
    return 0 < p < 1 and named.get("train") is not False


def _named(node: fx.Node) -> dict[str, Any]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    named = {a.name: a.default_value for a in arguments}
    return named | dict(zip(named, node.args, strict=False)) | node.kwargs


class _Emit:
    """Appends ops to the graph before ``node``, whose input ``x`` and probability ``p`` it knows.

    Every value has the shape and the gradient of ``x``, unless told otherwise.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self.x: fx.Node = node.args[0]  # type: ignore[assignment]
        self.p: float = _named(node)["p"]
        self.spec = replace(
            spec_of(self.x), dtype=_first(info(node).spec).dtype, differentiable=_grad(node)
        )

    def __call__(
        self, target: Any, *args: Any, spec: TensorSpec | None = None, **kwargs: Any
    ) -> fx.Node:
        spec = spec or self.spec
        return derive(self.graph, target, args, kwargs, like=self.node, origin=NAME, spec=spec)

    def dropped_ones(self, shape: tuple[int, ...]) -> fx.Node:
        spec = replace(spec_of(self.x), shape=shape, differentiable=False)
        ones = self(aten.ones.default, list(shape), spec=spec, dtype=spec.dtype, device=spec.device)
        return self(aten.dropout.default, ones, self.p, True, spec=spec)

    def channels(self) -> fx.Node:
        """A dropout of ones, one for each row and channel."""
        rows, channels, *rest = self.spec.shape
        return self.dropped_ones((rows, channels, *(1 for _ in rest)))

    def moved_back(self, dropped: fx.Node) -> fx.Node:
        """From ``dropout(x + c)`` to the mean and the variance of ``x``."""
        p = self.p
        a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        scaled = self(aten.mul.Tensor, dropped, a * (1 - p))
        return self(aten.add.Tensor, scaled, a * _ALPHA * (p - 1))

    def done(self, value: fx.Node) -> None:
        self.node.replace_all_uses_with(value)
        self.graph.erase_node(self.node)


def _first(spec: Any) -> TensorSpec:
    found: TensorSpec = spec[0] if isinstance(spec, tuple) else spec
    return found


def _grad(node: fx.Node) -> bool:
    return _first(info(node).spec).differentiable


def _feature(graph: fx.Graph, node: fx.Node) -> None:
    emit = _Emit(graph, node)
    emit.done(emit(aten.mul.Tensor, emit.x, emit.channels()))


def _alpha(graph: fx.Graph, node: fx.Node) -> None:
    emit = _Emit(graph, node)
    moved = emit(aten.add.Tensor, emit.x, _ALPHA)
    emit.done(emit.moved_back(emit(aten.dropout.default, moved, emit.p, True)))


def _feature_alpha(graph: fx.Graph, node: fx.Node) -> None:
    emit = _Emit(graph, node)
    moved = emit(aten.add.Tensor, emit.x, _ALPHA)
    emit.done(emit.moved_back(emit(aten.mul.Tensor, moved, emit.channels())))


def _native(graph: fx.Graph, node: fx.Node) -> None:
    """The mask, where it is used, is that of a dropout of ones."""
    emit = _Emit(graph, node)
    items = {int(n.args[1]): n for n in node.users if is_getitem(n)}  # type: ignore[arg-type]
    if 1 in items:
        kept = emit.dropped_ones(emit.spec.shape)
        mask = replace(spec_of(kept), dtype=torch.bool)
        values = [
            emit(aten.mul.Tensor, emit.x, kept),
            emit(aten.ne.Scalar, kept, 0, spec=mask),
        ]
    else:
        values = [emit(aten.dropout.default, emit.x, emit.p, True)]
    for index, item in items.items():
        item.replace_all_uses_with(values[index])
        graph.erase_node(item)
    graph.erase_node(node)


_REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], None]] = {
    aten.scaled_dot_product_attention.default: attention_with_dropout,
    aten.feature_dropout.default: _feature,
    aten.alpha_dropout.default: _alpha,
    aten.feature_alpha_dropout.default: _feature_alpha,
    aten.native_dropout.default: _native,
}
