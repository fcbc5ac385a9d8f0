"""verify: prove a program well-typed, from the rules alone.

Each check is a small function that raises :class:`VerifyError` with the node and its source
line. Shapes are re-derived by running each op on fake tensors, types op by op on fresh axes, from
the types of placeholders and state: what the planner decided is not trusted. If they agree, the
program computes what it would compute without its conversions, and every gradient has the dual
type of its value, so parameters get whole gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphpar.errors import VerifyError
from graphpar.program import Program
from graphpar.unfuse import unfused
from graphpar.verify.node import Check
from graphpar.verify.shapes import check_local_shapes, check_shapes
from graphpar.verify.structure import (
    check_items,
    check_links,
    check_lint,
    check_ops,
    check_provenance,
    check_regions,
    check_seeds,
)
from graphpar.verify.types import (
    check_local_arguments,
    check_means,
    check_random,
    check_state,
    check_types,
)

__all__ = ["CHECKS", "FUSED_CHECKS", "Check", "verify"]

_STRUCTURE: tuple[Check, ...] = (check_lint, check_provenance, check_links, check_ops)
_SEEDS: tuple[Check, ...] = (check_seeds, check_regions)
_TYPES: tuple[Check, ...] = (check_state, check_types, check_random)
_LOCAL: tuple[Check, ...] = (check_means, check_local_arguments)

FUSED_CHECKS: tuple[Check, ...] = (*_STRUCTURE, check_regions, check_items)
"""Of a program with fused ops; the checks of its form are those of its parts."""

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "whole": (*_STRUCTURE, *_SEEDS, check_shapes),
    "typed": (*_STRUCTURE, *_TYPES, check_shapes),
    "local": (*_STRUCTURE, *_SEEDS, *_TYPES, *_LOCAL, check_shapes, check_local_shapes),
}


def verify(program: Program) -> None:
    """Raise :class:`VerifyError` at the first thing that is wrong with the program.

    Fused ops are proven as the conversions and products that they stand for.
    """
    parts = _unfused(program)
    if parts is not program:
        for check in FUSED_CHECKS:
            check(program)
    for check in CHECKS[program.form]:
        check(parts)


def _unfused(program: Program) -> Program:
    try:
        return unfused(program)
    except Exception as error:
        raise VerifyError(f"a fused op is malformed: {error or type(error).__name__}") from error
