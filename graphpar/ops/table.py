"""The one table that ties pairs of types to conversion ops, their arguments and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from graphpar.errors import InternalError
from graphpar.types import I, P, R, Shard, Type, dual, letter

# (source, target) → (op, arguments between the tensor and the group). "source" and "target" stand
# for the dimension and blocks of that Shard, a letter for itself.
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
    for field in fields:
        kind = {"source": source, "target": target}.get(field)
        args += [kind.dim, kind.blocks] if isinstance(kind, Shard) else [field]
    op: torch._ops.OpOverload = getattr(torch.ops.graphpar, name).default
    return op, (*args, group)


def is_conversion(op: object) -> bool:
    """Whether ``op`` is one of the ops of the table."""
    return isinstance(op, torch._ops.OpOverload) and _rows(op.name()) != []


def signature(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Type, Type]:
    """The types that ``op`` converts between: the inverse of :func:`conversion`.

    ``args`` are the op's arguments after the tensor; the group may be left out.
    """
    for letters, fields in _rows(op.name()):
        values, match = list(args), True
        types = [_TYPES.get(name) for name in letters]
        for field in fields:
            if field in ("source", "target"):
                dim, blocks = values.pop(0), values.pop(0)
                types[field == "target"] = Shard(int(dim), tuple(map(int, blocks)))
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
    """The conversion that carries the gradient of ``op(x, *args)``; the group is ``args[-1]``."""
    source, target = signature(op, args)
    return conversion(dual(target), dual(source), args[-1])


def _rows(name: str) -> list[tuple[tuple[str, str], tuple[str, ...]]]:
    return [(k, fields) for k, (op, fields) in CONVERSION_OPS.items() if f"graphpar::{op}" == name]
