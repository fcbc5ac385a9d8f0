"""Shapes, re-derived by running each op on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphpar.passes.rules import is_form, whole_op
from graphpar.program import Program, TensorSpec, info, of_rank, result_types, tensor_spec
from graphpar.types import I, Shard, local_shape
from graphpar.verify.node import SEEDS, failure, is_graphpar, is_op, operand_types, per_node

SEED_SPEC = TensorSpec((2,), torch.int64, torch.device("cpu"))


@per_node
def check_shapes(program: Program, block: str, node: fx.Node) -> None:
    """Each op, run on fake tensors of its operands' whole shapes, gives its result's."""
    if is_form(node.target):
        _compare_shapes(node, info(node).whole_call, 1)
    elif node.target in SEEDS:
        if tensor_spec(node) != SEED_SPEC:
            raise failure(node, f"{node.name} is no seed: {tensor_spec(node)}")
    elif is_graphpar(node):
        if tensor_spec(node) != tensor_spec(node.args[0]):  # type: ignore[arg-type]
            raise failure(node, f"{node.target} keeps the whole tensor's shape")
    elif is_op(node):
        _compare_shapes(node, info(node).whole_call or (node.args, node.kwargs), 1)


@per_node
def check_local_shapes(program: Program, block: str, node: fx.Node) -> None:
    """So it does on the shapes of one rank: of each where they are not the same."""
    if not is_op(node):
        return
    kinds = (*operand_types(node), *result_types(node))
    uneven = any(isinstance(kind, Shard) and kind.units for kind in kinds)
    for rank in range(program.ranks if uneven else 1):
        _compare_shapes(node, of_rank((node.args, node.kwargs), rank), program.ranks, rank)


def _compare_shapes(node: fx.Node, call: Any, ranks: int, rank: int = 0) -> None:
    def local(spec: TensorSpec, kind: Any) -> Any:
        return replace(spec, shape=local_shape(spec.shape, kind or I, rank, ranks))

    args, kwargs = fx.node.map_arg(call, lambda n: local(tensor_spec(n), info(n).type))
    spec, kind = info(node).spec, info(node).type
    specs = spec if isinstance(spec, tuple) else (spec,)
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(specs)
    wanted = [s and local(s, declared) for s, declared in zip(specs, kinds, strict=True)]
    leaves = tuple(map(type, pytree.tree_leaves((args, kwargs))))
    call = whole_op(node.target), _frozen(args), _frozen(kwargs), leaves
    quick = _meta_results(*call)
    if quick is not None and not _fault(quick, wanted):
        return
    fault = _fault(_fake_results(*call), wanted)
    if fault:
        raise failure(node, f"{node.name} {fault}")


_Results = Sequence[TensorSpec | None]


def _fault(found: _Results, wanted: _Results) -> str:
    """What is wrong with results; nothing if they are as they are said to be."""
    if len(found) != len(wanted):
        return f"gives {len(found)} results, not {len(wanted)}"
    for result, said in zip(found, wanted, strict=True):
        if said is None or result is None:
            if said is not result:
                return f"gives {result}, not {said}"
        elif (result.shape, result.dtype) != (said.shape, said.dtype):
            is_, is_not = (f"{s.dtype}{list(s.shape)}" for s in (result, said))
            return f"is {is_}, not {is_not}"
        elif result.differentiable and not said.differentiable:
            return "has a gradient, but is said to have none"
    return ""


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=1 << 14)
def _fake_results(
    target: Any, args: Any, kwargs: Any, leaves: tuple[type, ...]
) -> tuple[TensorSpec | None, ...]:
    """What the op gives on tensors of the given specs; it depends on nothing else.

    ``leaves`` are the types of the arguments: 1 and 1.0 are one key without them.
    """
    with FakeTensorMode():
        return _results(target, args, kwargs)


@lru_cache(maxsize=1 << 14)
def _meta_results(
    target: Any, args: Any, kwargs: Any, leaves: tuple[type, ...]
) -> tuple[TensorSpec | None, ...] | None:
    """The same on the meta device, if there is a kernel, in a tenth of the time: fake tensors run
    the same kernels, unless an op gives something else on another device, and know the rules of
    devices, of which there may be one here."""
    specs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, TensorSpec)]
    if len({spec.device for spec in specs}) != 1 or {torch.device, str} & set(leaves):
        return None
    try:
        return _results(target, args, kwargs, torch.device("meta"))
    except Exception:  # an op without such a kernel; if it is another reason, it comes again
        return None


def _results(
    target: Any, args: Any, kwargs: Any, device: torch.device | None = None
) -> tuple[TensorSpec | None, ...]:
    """What the op gives on tensors of the given specs, all of them on ``device`` if it is given."""

    def tensor(value: Any) -> Any:
        if not isinstance(value, TensorSpec):
            return value
        return torch.empty(
            value.shape,
            dtype=value.dtype,
            device=device or value.device,
            requires_grad=value.differentiable,
        )

    with torch.enable_grad():
        found = target(
            *fx.node.map_aggregate(args, tensor),
            **{k: fx.node.map_aggregate(v, tensor) for k, v in kwargs},
        )
    values = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(
        TensorSpec(tuple(v.shape), v.dtype, v.device, v.requires_grad)
        if isinstance(v, torch.Tensor)
        else None
        for v in values
    )
