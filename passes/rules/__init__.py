"""Op rules: what an op does to named axes.

:data:`RULES` is one literal table from op to rule. A rule takes a :class:`Call` and ties the axes
of its operands and results together. :func:`rule_for` also covers all ops that torch tags
pointwise. An op without a rule is *opaque*.
"""

from __future__ import annotations

from graphpar.passes.rules.call import Call, OpRule, call_of, tensor_arguments
from graphpar.passes.rules.forms import ALONG_WEIGHTS, FORMS, is_form, whole_op
from graphpar.passes.rules.strategy import Strategy, partial_strategies, shard_strategy
from graphpar.passes.rules.table import (
    RULES,
    local_call,
    op_axes,
    register_rule,
    rule_for,
    summed_size,
)

__all__ = [
    "ALONG_WEIGHTS",
    "FORMS",
    "RULES",
    "Call",
    "OpRule",
    "Strategy",
    "call_of",
    "is_form",
    "local_call",
    "op_axes",
    "partial_strategies",
    "register_rule",
    "rule_for",
    "shard_strategy",
    "summed_size",
    "tensor_arguments",
    "whole_op",
]
