"""Calls that differ in sizes only: one export with symbols in place of sizes serves them all.

The sizes of the first call are numbers. When a later call has others, the model is exported once
more, and the sizes that varied stay symbols where the model lets them (what torch.compile calls
automatic dynamic shapes). From then on a call with new sizes costs no run of the model: its
numbers are put in, and all that follows sees a trace like that of any other call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode
from torch.export.graph_signature import InputKind

from graphpar.errors import TraceError
from graphpar.program import Program
from graphpar.trace.call import bind, call_key, flatten
from graphpar.trace.export import Exported, LeafDim, clone_inputs, export
from graphpar.trace.program import is_once, lower


@dataclass(slots=True)
class _Form:
    """Calls that are equal but for sizes: those of the first, which dims varied since, which
    of these the model does not leave free, and the symbolic exports."""

    first: dict[LeafDim, int]
    varied: set[LeafDim] = field(default_factory=set)
    fixed: set[LeafDim] = field(default_factory=set)
    symbolic: list[Exported] = field(default_factory=list)


class Tracer:
    """:func:`graphpar.trace.trace` for many calls of one model."""

    def __init__(self, mode: str = "once") -> None:
        self.mode = mode
        self._once = is_once(mode)
        self._forms: dict[Hashable, _Form] = {}

    def trace(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        flags: Hashable = None,
    ) -> Program:
        """The Program for such a call; ``flags`` is what else the trace depends on.

        Raises:
            InputError, TraceError: as :func:`graphpar.trace.trace`.
        """
        args, kwargs = bind(model, args, kwargs)
        return lower(model, self._exported(model, args, kwargs, flags), args, kwargs)

    def _exported(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], flags: Hashable
    ) -> Exported:
        leaves, _ = flatten(args, kwargs)
        sizes = {
            (at, dim): int(size)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            for dim, size in enumerate(leaf.shape)
        }
        form = self._forms.setdefault((call_key(args, kwargs, sizes=False), flags), _Form(sizes))
        for exported in form.symbolic:
            if (numeric := specialize(exported, leaves)) is not None:
                return numeric
        form.varied |= {dim for dim, size in sizes.items() if size != form.first[dim]}
        free = {dim for dim in form.varied - form.fixed if sizes[dim] > 1}  # 0 and 1 are special
        if free and (symbolic := _symbolic_export(model, args, kwargs, free)) is not None:
            form.fixed |= _numbers(symbolic, free)
            if (numeric := specialize(symbolic, leaves)) is not None:
                form.symbolic.append(symbolic)
                return numeric
        exported = export(model, args, kwargs, once=self._once)
        form.fixed |= free
        return exported


def _symbolic_export(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], free: set[LeafDim]
) -> Exported | None:
    try:
        return export(model, args, kwargs, free)
    except TraceError:  # perhaps only with symbols
        return None


def _user_inputs(exported: Exported) -> list[Any]:
    """What the placeholders of the call's leaves hold: fake tensors, or other values."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    return [
        node.meta.get("val")
        for node, spec in zip(nodes, exported.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


def _numbers(exported: Exported, free: set[LeafDim]) -> set[LeafDim]:
    """The dims in ``free`` whose sizes became numbers after all."""
    values = _user_inputs(exported)
    return {(at, dim) for at, dim in free if _is_number(values[at].shape[dim])}


def _is_number(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def specialize(exported: Exported, leaves: Sequence[Any]) -> Exported | None:
    """``exported`` with the sizes of ``leaves`` for its symbols.

    ``None`` if what its trace assumed of the sizes does not hold for them (``s > 4`` where the
    model asked for it, a size that it used as a number).
    """
    leaves = clone_inputs(list(leaves))
    if not _holds(exported, leaves):
        return None
    try:
        return replace(exported, graph=_numeric_graph(exported, leaves))
    except Exception:  # an op, or a check that the trace deferred, refuses these sizes
        return None


def _holds(exported: Exported, leaves: Sequence[Any]) -> bool:
    pairs = [
        (symbolic, leaf)
        for symbolic, leaf in zip(_user_inputs(exported), leaves, strict=True)
        if isinstance(leaf, Tensor)
    ]
    if not pairs:
        return True
    environment = pairs[0][0].fake_mode.shape_env
    placeholders, arguments = zip(*pairs, strict=True)
    return bool(environment.evaluate_guards_for_args(placeholders, arguments, ignore_static=False))


def _numeric_graph(exported: Exported, leaves: Sequence[Any]) -> fx.Graph:
    """Run the graph on fake tensors of the given sizes, and write down what ran."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    made: dict[fx.Node, Any] = {}
    given, specs = iter(leaves), iter(exported.input_specs)
    open_regions: list[Any] = []
    with torch.enable_grad(), FakeTensorMode():
        try:
            for node in exported.graph.nodes:
                if node.op == "output":
                    graph.output(fx.map_arg(node.args[0], made.__getitem__))
                    break
                if node.op == "placeholder":
                    own = next(specs).kind is InputKind.USER_INPUT
                    values[node] = _fake(next(given) if own else node.meta["val"])
                else:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)
                    if node.target is autocast_mode._enter_autocast:
                        open_regions.append(values[node])
                    elif node.target is autocast_mode._exit_autocast:
                        open_regions.pop()
                    elif isinstance(values[node], (bool, int, float)):
                        made[node] = values[node]
                        continue
                made[node] = graph.node_copy(node, made.__getitem__)
                made[node].meta = {**node.meta, "val": values[node]}
        finally:
            while open_regions:
                autocast_mode._exit_autocast(open_regions.pop())
    return graph


def _fake(like: Any) -> Any:
    """A tensor of the present fake mode that looks like ``like``; other values are themselves."""
    if not isinstance(like, Tensor):
        return like
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_(like.requires_grad)
