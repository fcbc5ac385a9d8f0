"""Which cell a step is, from the form of its state; the formulas are those of torch.nn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from graphpar.passes.lower_recurrences.forms import Atom, Form, Forms, Function, Product
from graphpar.passes.lower_recurrences.pieces import Piece, piece, shape_of, width_of

Gate = tuple["Piece | Product", ...]
"""What is added up before the gate's sigmoid or tanh."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a cell.

    Attributes:
        h: its state [B, H]. c: the cell state of an LSTM.
        h_before, c_before: the states before it, where the form shows them beside the products:
            ``h_before`` of a GRU, ``c_before`` of an LSTM.
        negated: the gate that torch.nn's cell needs with the other sign.
        gates: in the order of torch.nn, without what the reset gate multiplies.
        inner: what the reset gate of a GRU multiplies.
    """

    cell: str
    h: fx.Node
    gates: tuple[Gate, ...]
    inner: Gate = ()
    c: fx.Node | None = None
    h_before: fx.Node | None = None
    c_before: Piece | None = None
    negated: int | None = None

    @property
    def hidden(self) -> int:
        return width_of(self.h)


def steps_of(forms: Forms, node: fx.Node) -> Iterator[Step]:
    """The steps of which ``node`` may be the state; several if roles are exchangeable."""
    form = forms.of(piece(node))
    if len(form) == 1:
        ((atoms, factor),) = form.items()
        if factor == 1 and len(atoms) == 1:
            yield from _rnn(forms, node, atoms[0])
        elif factor == 1 and len(atoms) == 2:
            yield from _lstm(forms, node, atoms)
    elif len(form) == 3:
        yield from _gru(forms, node, form)


def _rnn(forms: Forms, node: fx.Node, atom: Atom) -> Iterator[Step]:
    if isinstance(atom, Function) and atom.name in ("tanh", "relu"):
        gate = _terms(forms.of(atom.argument), width_of(node))
        if gate:
            yield Step(f"rnn_{atom.name}", node, (gate,))


def _lstm(forms: Forms, node: fx.Node, atoms: tuple[Atom, ...]) -> Iterator[Step]:
    output, squashed = _two(atoms, "sigmoid", "tanh")
    if output is None or squashed is None or not squashed.argument.is_whole:
        return
    cell = forms.of(squashed.argument)
    if len(cell) != 2 or set(cell.values()) != {1.0}:
        return
    for forgotten, new in (tuple(cell), tuple(cell)[::-1]):
        i, g = _two(new, "sigmoid", "tanh")
        if i is None or g is None or len(forgotten) != 2:
            continue
        for f, before in (forgotten, forgotten[::-1]):
            if not (isinstance(f, Function) and f.name == "sigmoid"):
                continue
            if isinstance(before, Function):
                continue
            if not isinstance(before, Piece) or before.size != width_of(node):
                continue
            gates = [_gate(forms, each, node) for each in (i, f, g, output)]
            if all(gates):
                c = squashed.argument.node
                yield Step("lstm", node, tuple(gates), c=c, c_before=before)


def _gru(forms: Forms, node: fx.Node, form: Form) -> Iterator[Step]:
    """``n - z n + z h``, or ``h - z h + z n``; n is the tanh of a sum with a product of r."""
    singles = [(term[0], factor) for term, factor in form.items() if len(term) == 1]
    if len(singles) != 1 or singles[0][1] != 1:
        return
    kept = singles[0][0]
    z = other = None
    for term, factor in form.items():
        if len(term) == 2 and kept in term and factor == -1:
            z = term[1 - term.index(kept)]
    for term, factor in form.items():
        if len(term) == 2 and z in term and kept not in term and factor == 1:
            other = term[1 - term.index(z)]
    if not (isinstance(z, Function) and z.name == "sigmoid"):
        return
    turned = isinstance(other, Function)
    n, before = (other, kept) if turned else (kept, other)
    if not (isinstance(n, Function) and n.name == "tanh"):
        return
    if not (isinstance(before, Piece) and before.is_whole):
        return
    argument = forms.of(n.argument)
    products = [(term, factor) for term, factor in argument.items() if len(term) == 2]
    if len(products) != 1 or products[0][1] != 1:
        return
    term = products[0][0]
    for r, inside in (term, term[::-1]):
        if isinstance(r, Function) and r.name == "sigmoid" and isinstance(inside, Piece):
            inner = _terms(forms.of(inside), width_of(node))
            rest = {term: factor for term, factor in argument.items() if len(term) != 2}
            outer = _terms(rest, width_of(node))
            first, second = _gate(forms, r, node), _gate(forms, z, node)
            if inner and outer is not None and first and second:
                gates = first, second, outer
                negated = 1 if turned else None
                yield Step("gru", node, gates, inner, h_before=before.node, negated=negated)


def _two(atoms: tuple[Atom, ...], *names: str) -> tuple[Function | None, Function | None]:
    """The two functions of these names that the atoms are, if they are."""
    found = {a.name: a for a in atoms if isinstance(a, Function)}
    if len(atoms) != 2 or set(found) != set(names):
        return None, None
    return found[names[0]], found[names[1]]


def _gate(forms: Forms, function: Function, node: fx.Node) -> Gate:
    return _terms(forms.of(function.argument), width_of(node)) or ()


def _terms(form: Form, size: int) -> Gate | None:
    """The addends of a form that only adds, each of ``size`` columns."""
    found: list[Piece | Product] = []
    for term, factor in form.items():
        if len(term) != 1 or factor != 1 or isinstance(term[0], Function):
            return None
        atom = term[0]
        if atom.size != size or (isinstance(atom, Piece) and len(shape_of(atom.node)) > 2):
            return None
        found.append(atom)
    return tuple(found)


def products(gate: Iterable[Piece | Product]) -> Iterator[Product]:
    return (term for term in gate if isinstance(term, Product))
