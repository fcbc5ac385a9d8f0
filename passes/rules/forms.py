"""Ops that have a form of their own on shards, in ``torch.ops.graphpar``: it knows its rank.

Where a rule names dimensions as ``own`` (:class:`graphpar.passes.rules.call.OpRule`) and the
first operand is cut along one of them, localize puts the form in the op's place. Its arguments
are those of the op, then the dimension, its blocks and the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

aten = torch.ops.aten

FORMS: Mapping[torch._ops.OpOverload, str] = {
    aten.embedding.default: "embedding",
    aten.gather.default: "gather",
    aten.cross_entropy_loss.default: "cross_entropy",
    aten.nll_loss_nd.default: "nll_loss",
    aten.log_softmax.int: "log_softmax",
}
ALONG_WEIGHTS = frozenset(FORMS) - {aten.gather.default}
"""The ops that take shards of a weight's axis as its product leaves them, whatever that costs: the
largest tensors of a model, logits and tied tables, are never whole on a rank. A gather may be a
router's, whose few experts are better whole."""

_WHOLE = {f"graphpar::{name}": op for op, name in FORMS.items()}


def form_of(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The form on shards of an op of :data:`FORMS`."""
    form: torch._ops.OpOverload = getattr(torch.ops.graphpar, FORMS[op]).default
    return form


def is_form(target: object) -> bool:
    """Whether an op is the form on shards of another."""
    return isinstance(target, torch._ops.OpOverload) and target.name() in _WHOLE


def whole_op(target: Any) -> Any:
    """The op that a form stands for; every other target is its own."""
    return _WHOLE[target.name()] if is_form(target) else target
