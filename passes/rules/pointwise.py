"""Rules of ops that treat every element alike."""

from __future__ import annotations

import torch

from graphpar.passes.rules.call import Call, OpRule, broadcast

aten = torch.ops.aten

# Pointwise in effect, but not tagged so.
UNTAGGED = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.softplus.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.__xor__.Tensor,
    aten.log_sigmoid.default,
    aten.selu.default,
    aten.celu.default,
    aten.hardswish.default,
    aten.type_as.default,
    aten.floor_divide.default,
    aten._prelu_kernel.default,
    aten.complex.default,
    aten.polar.default,
    aten._conj.default,
}

# The second operand gives only its dtype and device.
_LIKE_OTHER = {aten.to.other, aten.type_as.default}

_LINEAR_ALONE = {
    aten.neg.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.positive.default,
    aten._conj.default,
    aten.conj_physical.default,
    aten.mul.Scalar,
    aten.div.Scalar,
}
_LINEAR_TOGETHER = {aten.add.Tensor, aten.sub.Tensor, aten.complex.default}


def is_pointwise(target: object) -> bool:
    """Ops that draw random numbers are not: each rank would draw its own (``rrelu``). Nor are
    those that answer for all elements at once (``equal``)."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    alike = torch.Tag.pointwise in target.tags and isinstance(
        target._schema.returns[0].type, torch.TensorType
    )
    return target in UNTAGGED or (alike and torch.Tag.nondeterministic_seeded not in target.tags)


def pointwise(call: Call) -> OpRule:
    """Broadcast the operands' dimensions from the right."""
    dims, stuck = broadcast(call.operands[:1] if call.target in _LIKE_OTHER else call.operands)
    return OpRule([dims] * len(call.results), whole=stuck, partial=_linear(call))


def _linear(call: Call) -> list[set[int]]:
    places = set(range(len(call.operands)))
    if call.target in _LINEAR_ALONE:
        return [{0}]
    if call.target is aten.dropout.default:
        return [] if call["train"] and call["p"] else [{0}]
    if call.target in _LINEAR_TOGETHER and len(places) == 2:
        return [places]
    if call.target is aten.mul.Tensor:
        return [{place} for place in places]
    if call.target in (aten.div.Tensor, aten.true_divide.Tensor):
        return [{0}]
    return []
