"""Rules written as formulas over dimension letters.

``"... k, n k, +n -> ... n"``: one term per tensor argument, then the results. ``...`` stands for
leading dimensions, broadcast from the right. A letter that no result has is contracted.
``[c]`` must stay whole. A term that starts with ``+`` is added to the result (a bias; ``+`` alone
is a scalar): where it is present, contracted letters stay whole, since each rank would add it.
Absent optional arguments are dropped from the formula.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from graphpar.axes import Term, TermDim, TermDims, flatten
from graphpar.passes.rules.call import Call, Operand, OpRule, tie


def einsum(
    call: Call, formula: str, operands: Sequence[Operand | None], *, linear: bool = True
) -> OpRule:
    """Apply a formula to the given operands (``None`` for absent ones).

    ``linear``: the op is linear in each operand of a formula that contracts.
    """
    left, right = formula.split("->")
    pairs = [(t.split(), o) for t, o in zip(left.split(","), operands, strict=True) if o]
    whole: TermDim = []
    groups: dict[str, list[tuple[int, TermDim]]] = {}
    biased = False
    for letters, operand in pairs:
        biased |= letters[0].startswith("+")
        for letter, size, dim in _spell(letters, operand):
            groups.setdefault(letter.strip("[]"), []).append((size, dim))
            if letter.startswith("["):
                whole += dim
    common, stuck = tie(list(groups.values()))
    dims = dict(zip(groups, common, strict=True))
    outs = [[letter.strip("[]") for letter in term.split()] for term in right.split(",")]
    spread = sorted((n for n in dims if n.startswith(".")), reverse=True)
    results: list[TermDims] = []
    for out in outs:
        letters = [n for o in out for n in (spread if o == "..." else [o])]
        results.append([dims[n] for n in letters])
    kept = {n for out in outs for n in out}
    contracted = [t for n, dim in dims.items() if n not in kept and n[0] != "." for t in dim]
    whole += stuck
    if biased:
        whole += contracted
    held = {id(term) for term in flatten(whole)}
    contracted = [t for t in flatten(contracted) if id(t) not in held]
    added = {o.index for letters, o in pairs if letters[0].startswith("+")}
    factors = [o.index for _, o in pairs if o.index not in added]
    partial = [{index, *added} for index in factors] if linear else []
    return OpRule(results, whole=whole, contracted=contracted, partial=partial)


def _spell(letters: list[str], operand: Operand) -> list[tuple[str, int, TermDim]]:
    """Each dimension of the operand with its letter; those under ``...`` are numbered from the
    right (``.0`` is the last)."""
    letters = [letter.lstrip("+") for letter in letters if letter != "+"]
    extra = len(operand.shape) - len(letters) + 1
    names: list[str] = []
    for letter in letters:
        names += [f".{extra - 1 - i:03}" for i in range(extra)] if letter == "..." else [letter]
    return list(zip(names, operand.shape, operand.dims, strict=True))


def from_equation(equation: str, ranks: Sequence[int]) -> str | None:
    """The formula of a ``torch.einsum`` equation for tensors of these ranks; ``None`` if it
    repeats letters in one term. Without an output it is the letters that stand once, sorted."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    extra = {r - len(t.replace("...", "")) for t, r in zip(terms, ranks, strict=True) if "..." in t}
    free = [c for c in string.ascii_letters if c not in equation]
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = "".join(["..." if "..." in left else "", *once])
    if len(extra) > 1 or any(n > len(free) for n in extra):
        return None
    spread = "".join(free[: max(extra, default=0)])
    terms = [term.replace("...", spread) for term in terms]
    if any(len(set(t)) < len(t) for t in terms):
        return None
    return ", ".join(map(" ".join, terms)) + " -> " + " ".join(right.replace("...", spread))


def whole_terms(dims: TermDims) -> TermDim:
    """All terms of a tensor's dimensions."""
    return [term for dim in dims for term in dim]


def new_axis(size: int) -> TermDim:
    return [Term(size)] if size != 1 else []
