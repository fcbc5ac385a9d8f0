"""Values of a graph as sums of products: what a step computes, however it is written.

A piece of a node's last dimension has a *form*, a polynomial whose atoms are sigmoids, tanhs and
relus of pieces, matrix products, and pieces that are not looked into. So ``(1 - z) * n + z * h``
and ``n + z * (h - n)`` are one form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpar.passes.lower_recurrences.pieces import Piece, aten, piece, shape_of, whole, width_of

MOST_TERMS, MOST_DEPTH = 16, 50


@dataclass(frozen=True, slots=True)
class Product:
    """Columns [start, start + size) of ``x`` times a matrix.

    ``turned``: ``weight`` is [outputs, inputs]. Its inputs [first, first + count) meet ``x``.
    """

    x: fx.Node
    weight: fx.Node
    turned: bool
    first: int
    count: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Function:
    """``name`` (sigmoid, tanh, relu) of each element of a piece."""

    name: str
    argument: Piece


Atom = Piece | Product | Function
Form = Mapping[tuple[Atom, ...], float]
"""Coefficients of products of atoms; the empty product is a constant."""

FUNCTIONS: Mapping[Any, str] = {
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.relu.default: "relu",
}
_PRODUCTS = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default)


def factors_of(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """``x``, the matrix, and whether that is [outputs, inputs], of a product with a matrix."""
    if node.target not in _PRODUCTS:
        return None
    skipped = 1 if node.target is aten.addmm.default else 0
    args: Any = node.args[skipped:]
    x, weight, turned = args[0], args[1], node.target is aten.linear.default
    if len(shape_of(weight)) != 2 or len(shape_of(x)) != 2:
        return None
    while _is_transpose(weight):
        weight, turned = weight.args[0], not turned
    return whole(x), weight, turned


def _is_transpose(node: fx.Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    dims: Any = node.args[1:]
    return node.target is aten.transpose.int and {d % 2 for d in dims} == {0, 1}


class Forms:
    """Forms of a graph's pieces.

    Nodes that a product reads, and arguments of tanh, are states maybe: they are atoms of what is
    computed from them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.products = {n: f for n in graph.nodes if (f := factors_of(n)) is not None}
        self.operands = {part for x, _, _ in self.products.values() for part in _parts(x)}
        squashed = [n.args[0] for n in graph.nodes if n.target is aten.tanh.default]
        self._states = self.operands | {piece(n).node for n in squashed}
        self._known: dict[Piece, Form] = {}
        self._depth = 0

    def of(self, value: Piece) -> Form:
        """The form of a piece, looking into its node; a long one is an atom."""
        if value not in self._known:
            if self._depth > MOST_DEPTH:
                return {(value,): 1.0}
            self._depth += 1
            found = self._compute(value)
            self._depth -= 1
            fits = found is not None and len(found) <= MOST_TERMS
            self._known[value] = found if found is not None and fits else {(value,): 1.0}
        return self._known[value]

    def operand(self, value: Any, like: Piece) -> Form:
        """The form of an operand's columns that meet those of ``like``."""
        if isinstance(value, (int, float)):
            return {(): float(value)} if value else {}
        if width_of(value) != width_of(like.node):  # it broadcasts
            return {(Piece(value, 0, width_of(value)),): 1.0}
        if whole(value) in self._states:
            return {(Piece(whole(value), like.start, like.size),): 1.0}
        return self.of(piece(value, like.start, like.size))

    def _compute(self, value: Piece) -> Form | None:
        node, args = value.node, value.node.args
        if node.op != "call_function":
            return None
        if node.target in FUNCTIONS:
            argument = piece(args[0], value.start, value.size)  # type: ignore[arg-type]
            return {(Function(FUNCTIONS[node.target], argument),): 1.0}
        if node in self.products:
            return self._product(value)
        sums = _SUMS.get(node.target)
        if sums is None:
            return None
        return sums(self, [*args], node.kwargs, value)

    def _product(self, value: Piece) -> Form | None:
        node = value.node
        x, weight, turned = self.products[node]
        first = 0
        found: dict[tuple[Atom, ...], float] = {}
        for part in _parts(x):
            count = width_of(part)
            atom = Product(part, weight, turned, first, count, value.start, value.size)
            found, first = _add(found, {(atom,): 1.0}), first + count
        if node.target is aten.linear.default:
            bias = node.args[2] if len(node.args) > 2 else None
            return found if bias is None else _add(found, self.operand(bias, value))
        if node.target is aten.addmm.default:
            if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
                return None
            return _add(found, self.operand(node.args[0], value))
        return found

    def factor(self, value: Any, like: Piece) -> Form:
        """An operand of an elementwise product; one that holds a matrix product is an atom."""
        found = self.operand(value, like)
        if any(isinstance(atom, Product) for term in found for atom in term):
            return {(piece(value, like.start, like.size),): 1.0}
        return found


def _parts(x: fx.Node) -> list[fx.Node]:
    """What a product's operand is put together from, along its last dimension."""
    if x.target is aten.cat.default:
        args: Any = x.args
        dim: Any = args[1] if len(args) > 1 else x.kwargs.get("dim", 0)
        if dim % 2 == 1:
            return [whole(part) for part in args[0]]
    return [x]


def _add(a: Form, b: Form, scale: float = 1.0) -> dict[tuple[Atom, ...], float]:
    found = dict(a)
    for term, coefficient in b.items():
        found[term] = found.get(term, 0.0) + scale * coefficient
    return {term: coefficient for term, coefficient in found.items() if coefficient}


def _multiply(a: Form, b: Form) -> dict[tuple[Atom, ...], float]:
    found: dict[tuple[Atom, ...], float] = {}
    for one, x in a.items():
        for other, y in b.items():
            term = tuple(sorted(one + other, key=str))
            found[term] = found.get(term, 0.0) + x * y
    return {term: coefficient for term, coefficient in found.items() if coefficient}


Sum = Callable[[Forms, list[Any], Mapping[str, Any], Piece], Form]


def _added(sign: float) -> Sum:
    def form(forms: Forms, args: list[Any], options: Mapping[str, Any], value: Piece) -> Form:
        scale = args[2] if len(args) > 2 else options.get("alpha", 1)
        a, b = (forms.operand(x, value) for x in args[:2])
        return _add(a, b, sign * scale)

    return form


def _reversed(forms: Forms, args: list[Any], options: Mapping[str, Any], value: Piece) -> Form:
    return _added(-1.0)(forms, [args[1], args[0], *args[2:]], options, value)


def _multiplied(forms: Forms, args: list[Any], options: Mapping[str, Any], value: Piece) -> Form:
    return _multiply(forms.factor(args[0], value), forms.factor(args[1], value))


def _negated(forms: Forms, args: list[Any], options: Mapping[str, Any], value: Piece) -> Form:
    return _add({}, forms.operand(args[0], value), -1.0)


def _lerp(forms: Forms, args: list[Any], options: Mapping[str, Any], value: Piece) -> Form:
    start, end, weight = (forms.factor(x, value) for x in args)
    return _add(start, _multiply(weight, _add(end, start, -1.0)))


def _addcmul(forms: Forms, args: list[Any], options: Mapping[str, Any], value: Piece) -> Form:
    first = forms.operand(args[0], value)
    product = _multiply(forms.factor(args[1], value), forms.factor(args[2], value))
    return _add(first, product, options.get("value", 1))


_SUMS: Mapping[Any, Sum] = {
    aten.add.Tensor: _added(1.0),
    aten.add.Scalar: _added(1.0),
    aten.sub.Tensor: _added(-1.0),
    aten.sub.Scalar: _added(-1.0),
    aten.rsub.Tensor: _reversed,
    aten.rsub.Scalar: _reversed,
    aten.mul.Tensor: _multiplied,
    aten.mul.Scalar: _multiplied,
    aten.neg.default: _negated,
    aten.lerp.Tensor: _lerp,
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _addcmul,
}
