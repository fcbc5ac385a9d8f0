"""What is added to the gates of a step, sorted so that the terms of all steps meet."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from torch import fx

from graphpar.passes.lower_recurrences.forms import Product
from graphpar.passes.lower_recurrences.loops import Link, Values
from graphpar.passes.lower_recurrences.pieces import Piece, shape_of

Kind = Literal["product", "input", "bias"]


@dataclass(frozen=True, slots=True)
class Term:
    """An addend of the gates, in order; ``None`` where a gate has none.

    Of a "product" all pieces have one operand ``x``; an "input" has rows, a "bias" has none.
    ``inner``: that of the last gate is multiplied by the reset gate.
    """

    kind: Kind
    pieces: tuple[Piece | Product | None, ...]
    inner: bool = False

    @property
    def x(self) -> fx.Node:
        """The operand of a product, what an input is cut from."""
        return self.nodes[0]

    @property
    def nodes(self) -> list[fx.Node]:
        """What the pieces are cut from or, of a product, its operand."""
        found = (p.x if isinstance(p, Product) else p.node for p in self.pieces if p is not None)
        return list(dict.fromkeys(found))

    def key(self, values: Values) -> Hashable:
        """Equal for terms of two steps that are one term at two times."""
        nodes = self.nodes
        keys: list[Hashable] = []
        for each in self.pieces:
            if isinstance(each, Product):
                place = each.first, each.count, each.start, each.size
                keys.append((values.of(each.weight), each.turned, place))
            elif each is not None:
                what = values.of(each.node) if self.kind == "bias" else nodes.index(each.node)
                keys.append((what, each.start, each.size, len(shape_of(each.node))))
            else:
                keys.append(None)
        return self.kind, self.inner, tuple(keys)


def terms_of(link: Link, values: Values) -> list[Term]:
    """The terms of a step's gates. Those that one node gives to all gates are one term."""
    gates = [[(atom, False) for atom in gate] for gate in link.inputs]
    gates[-1] += [(atom, True) for atom in link.inner]
    found = []
    kinds: tuple[Kind, ...] = ("product", "input", "bias")
    for kind in kinds:
        own = [[each for each in gate if _kind(each[0]) == kind] for gate in gates]
        shared = _shared(own)
        rest = _alone(own) if kind == "product" else [list(g) for g in zip_longest(*own)]
        for group in (*shared, *rest):
            pieces = tuple(None if each is None else each[0] for each in group)
            found.append(Term(kind, pieces, any(each[1] for each in group if each)))
    return sorted(found, key=lambda term: str(term.key(values)))


_Atom = tuple["Piece | Product", bool]
_Group = list["_Atom | None"]


def _kind(atom: Piece | Product) -> Kind:
    if isinstance(atom, Product):
        return "product"
    return "input" if len(shape_of(atom.node)) == 2 else "bias"


def _node(atom: Piece | Product) -> fx.Node:
    return atom.x if isinstance(atom, Product) else atom.node


def _shared(gates: list[list[_Atom]]) -> list[_Group]:
    """Take out of ``gates`` what one node gives to all of them."""
    found: list[_Group] = []
    for first in list(gates[0]):
        node, group = _node(first[0]), [first]
        for gate in gates[1:]:
            group += [each for each in gate if _node(each[0]) is node][:1]
        if len(group) == len(gates):
            found.append([*group])
            for gate, each in zip(gates, group, strict=True):
                gate.remove(each)
    return found


def _alone(gates: list[list[_Atom]]) -> list[_Group]:
    """What a gate has for itself."""
    count = len(gates)
    return [
        [None] * place + [atom] + [None] * (count - place - 1)
        for place, gate in enumerate(gates)
        for atom in gate
    ]
