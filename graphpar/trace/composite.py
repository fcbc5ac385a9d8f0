"""Ops that PyTorch itself composes of others, taken apart where no rule knows them.

Such an op (``CompositeImplicitAutograd``: ``tensordot``, ``cosine_similarity``, ``max_pool1d``,
``kl_div``, …) runs, and is differentiated, as the ops it calls, so that its parts give the same
bits. What is left without a rule are ops with a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from graphpar.passes.rules import rule_for
from graphpar.trace import functions
from graphpar.trace.build import op_name
from graphpar.trace.simplify import has_plain_spelling

_RECURRENCES = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def is_composite(target: OpOverload) -> bool:
    """Whether ``target`` is to be taken apart. Recurrences stay whole, random ops their own."""
    return (
        rule_for(target) is None
        and not has_plain_spelling(target)
        and op_name(target) not in _RECURRENCES
        and target.namespace != functions.NAMESPACE
        and torch.Tag.nondeterministic_seeded not in target.tags
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            target.name(), "CompositeImplicitAutograd"
        )
    )


def parts(
    node: fx.Node, target: OpOverload, contexts: Sequence[AbstractContextManager[Any]]
) -> tuple[fx.Graph, list[fx.Node]] | None:
    """The graph of what the op of ``node`` calls within ``contexts``, and the nodes that its
    placeholders stand for; ``None`` if that cannot be seen."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    operands: list[fx.Node] = [leaves[i] for i in places]
    if not all(isinstance(n.meta.get("val"), Tensor) for n in operands):
        return None

    def call(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    try:
        with ExitStack() as stack:
            for context in (torch.no_grad(), *contexts):
                stack.enter_context(context)
            traced = make_fx(call, tracing_mode="real")(*(n.meta["val"] for n in operands))
    except Exception:  # its shapes depend on values, or it refuses fake tensors: it stays whole
        return None
    seen = all("val" in n.meta for n in traced.graph.nodes if n.op == "call_function")
    return (traced.graph, operands) if seen else None
