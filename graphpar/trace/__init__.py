"""Trace: a module and example inputs in, a flat functional :class:`Program` out.

``Info.source.module`` of a node is the path of the innermost module call that made it. When a
module is called again its later calls carry a suffix: ``encoder.norm``, ``encoder.norm@1``, ...
"""

from __future__ import annotations

from graphpar.trace.call import bind, call_key, example_inputs, flatten, signature_of, unflatten
from graphpar.trace.program import trace
from graphpar.trace.skeleton import skeleton
from graphpar.trace.symbolic import Tracer

__all__ = [
    "Tracer",
    "bind",
    "call_key",
    "example_inputs",
    "flatten",
    "signature_of",
    "skeleton",
    "trace",
    "unflatten",
]
