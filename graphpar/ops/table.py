"""The one table that ties pairs of types to conversion ops, their arguments and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from graphpar.errors import InternalError
from graphpar.types import I, P, R, Shard, Type, dual, letter

# (source, target) → (op, arguments between the tensor and the group). "source" and "target" stand
# for the dimension and blocks of that Shard, whose units follow the group; a letter for itself.
CONVERSION_OPS: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("I", "R"): ("convert", ()),
    ("P", "I"): ("all_reduce", ("I",)),
    ("P", "R"): ("all_reduce", ("R",)),
    ("S", "R"): ("all_gather", ("source", "R")),
    ("S", "I"): ("all_gather", ("source", "I")),
    ("P", "S"): ("reduce_scatter", ("target",)),
    ("S", "S"): ("all_to_all", ("source", "target")),
    ("I", "S"): ("shard", ("I", "target")),
    ("R", "S"): ("shard", ("R", "target")),
    ("S", "P"): ("pad", ("source",)),
}

_TYPES: dict[str, Type] = {"I": I, "R": R, "P": P}


def conversion(
    source: Type, target: Type, group: str
) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    """The op that converts ``source`` to ``target``, and its arguments after the tensor."""
    row = CONVERSION_OPS.get((letter(source), letter(target)))
    if row is None:
        raise InternalError(f"no conversion from {source} to {target}")
    name, fields = row
    args: list[Any] = []
    units: list[int] = []
    for field in fields:
        kind = {"source": source, "target": target}.get(field)
        if isinstance(kind, Shard):
            args += [kind.dim, kind.blocks]
            units.append(kind.units)
        else:
            args.append(field)
    op: torch._ops.OpOverload = getattr(torch.ops.graphpar, name).default
    return op, (*args, group, *(units if any(units) else ()))


def is_conversion(op: object) -> bool:
    """Whether ``op`` is one of the ops of the table."""
    return isinstance(op, torch._ops.OpOverload) and _rows(op.name()) != []


def signature(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Type, Type]:
    """The types that ``op`` converts between: the inverse of :func:`conversion`.

    ``args`` are the op's arguments after the tensor; the group may be left out.
    """
    for letters, fields in _rows(op.name()):
        values, match = list(args), True
        units = iter(values[_group_place(fields) + 1 :])
        types = [_TYPES.get(name) for name in letters]
        for field in fields:
            if field in ("source", "target"):
                dim, blocks = values.pop(0), values.pop(0)
                kind = Shard(int(dim), tuple(map(int, blocks)), int(next(units, 0)))
                types[field == "target"] = kind
            else:
                match &= values.pop(0) == field
        source, target = types
        if match and source is not None and target is not None:
            return source, target
    raise InternalError(f"{op} with arguments {tuple(args)} is not a conversion")


@lru_cache(maxsize=4096)
def gradient(
    op: torch._ops.OpOverload, args: tuple[Any, ...]
) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    """The conversion that carries the gradient of ``op(x, *args)``."""
    source, target = signature(op, args)
    return conversion(dual(target), dual(source), group_of(op, args))


def group_of(op: torch._ops.OpOverload, args: Sequence[Any]) -> str:
    """The group among a conversion's arguments after the tensor."""
    _, fields = _rows(op.name())[0]
    group: str = args[_group_place(fields)]
    return group


def _group_place(fields: tuple[str, ...]) -> int:
    return sum(2 if field in ("source", "target") else 1 for field in fields)


def _rows(name: str) -> list[tuple[tuple[str, str], tuple[str, ...]]]:
    return [(k, fields) for k, (op, fields) in CONVERSION_OPS.items() if f"graphpar::{op}" == name]
