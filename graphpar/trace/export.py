"""``torch.export`` of a module, with its failures told in the user's terms."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ShapesCollection
from torch.export.graph_signature import InputSpec
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from graphpar.errors import GraphparWarning, TraceError
from graphpar.provenance import Source
from graphpar.trace.assigned import assignments_written
from graphpar.trace.call import register_dataclasses
from graphpar.trace.once import Once, Runs
from graphpar.trace.patches import one_at_a_time
from graphpar.trace.questions import Unlike
from graphpar.trace.report import TraceReport
from graphpar.trace.watch import watched
from graphpar.trace.where import LIBRARY_ROOTS, trace_error, user_line

_ASSIGNED = re.compile(r"The tensor attributes? (.*?) (?:was|were) assigned during export")

# What torch.export says, and what the user can do about it.
_ADVICE = (
    (
        r"Found <class '([^']*Cache)'> in output",
        "its output holds a key-value cache ({0}); pass use_cache=False, or set it in the config",
    ),
    (
        r"Found <class '([^']*)'> in (?:the )?(?:input|output)|type <class '([^']*)'>",
        "{0} is among its arguments or results; use tensors and containers or dataclasses of them, "
        "or register it with torch.utils._pytree.register_pytree_node",
    ),
    (
        r"fake tensor in the exported program constant's list",
        "it uses a tensor in a way that tracing cannot follow (Tensor.data?); use Tensor.detach()",
    ),
    (
        r"[Dd]ata-dependent|GuardOnDataDependent|DataDependentOutput|HigherOrderOp|_local_scalar_dense|"
        r"type must be tuple of ints,but got FakeTensor|PackedSequence",
        "its control flow or its shapes depend on the values of tensors; compute with tensors "
        "instead (torch.where, masks, padding), or take the decision outside the model",
    ),
)


def _line_of(error: BaseException) -> Source | None:
    """The innermost line of the user's code that ``error``, or what caused it, passed through."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in reversed(chain):
        if (line := user_line(traceback.extract_tb(link.__traceback__))) is not None:
            return line
    return None


def _explain(error: Exception) -> TraceError:
    text = f"{type(error).__name__}: {error}"
    for pattern, advice in _ADVICE:
        if found := re.search(pattern, text):
            reason = advice.format(next((g for g in found.groups() if g), ""))
            break
    else:
        reason = next((line for line in text.splitlines() if line.strip()), "")
    return trace_error(f"torch.export cannot trace the model: {reason}", _line_of(error))


def clone_inputs(tree: Any) -> Any:
    """Clones of all tensors, so that a tensor that is passed twice is not traced as one."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), tree)


@dataclass(frozen=True, slots=True)
class Exported:
    """The pre-dispatch ATen graph of a module, with what its placeholders stand for.

    ``constants``: the tensors that the forward uses and the model does not register, by name.
    ``assigned``: the tensor attributes that the forward assigns (``layer.state``). ``runs`` are
    what the run nodes of the graph stand for, and ``report`` says how repeated layers were traced.
    """

    graph: fx.Graph
    input_specs: Sequence[InputSpec]
    constants: Mapping[str, Any]
    out_spec: TreeSpec
    assigned: frozenset[str]
    runs: Runs = field(default_factory=dict)
    report: TraceReport = field(default_factory=TraceReport)


LeafDim = tuple[int, int]
"""A dimension of an input: the position among the leaves of the call, and the dimension."""


def export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    free: Collection[LeafDim] = (),
    *,
    once: bool = False,
) -> Exported:
    """Export ``model`` for such a call; the sizes in ``free`` stay symbols where they can.

    With ``once``, and all sizes numbers, layers that do the same are traced once.

    Raises:
        TraceError: with the user's line and what to do about it.
    """
    if not once:
        return _export(model, args, kwargs, free, None)
    if free:
        reason = "sizes are left free"
    else:
        shared = Once(model)
        try:
            return _export(model, args, kwargs, (), shared)
        except Exception as error:  # if sharing is not why, it comes again
            asked = shared.questions.asked
            reason = f"the model asks for {asked}" if asked else str(error)
    exported = _export(model, args, kwargs, free, None)
    return replace(exported, report=TraceReport(flat=reason.partition("\n")[0]))


def _export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    free: Collection[LeafDim],
    shared: Once | None,
) -> Exported:
    def watch_outputs(module: nn.Module, arguments: Any, result: Any) -> None:
        register_dataclasses(result)

    notices: list[str] = []
    with one_at_a_time(), torch.inference_mode(False), torch.enable_grad():
        register_dataclasses((tuple(args), dict(kwargs)))
        inputs = clone_inputs(tuple(args)), clone_inputs(dict(kwargs))
        shapes = _free_shapes(model, inputs, free) if free else None
        handle = model.register_forward_hook(watch_outputs)
        sharing = nullcontext() if shared is None else shared.watching()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with watched(model, notices.append), assignments_written(model), sharing:
                    program = torch.export.export(
                        model, *inputs, dynamic_shapes=shapes, strict=False
                    )
        except TraceError:
            raise
        except Exception as error:
            raise _explain(error) from error
        finally:
            handle.remove()
    if shared is not None and shared.questions.asked:
        raise Unlike(shared.questions.asked)
    for notice in dict.fromkeys(notices):
        warnings.warn(notice, GraphparWarning, stacklevel=4)
    assigned: set[str] = set()
    for warning in caught:
        if found := _ASSIGNED.match(str(warning.message)):
            assigned.update(name.removeprefix("self.") for name in found[1].split(", "))
        elif not warning.filename.startswith(LIBRARY_ROOTS):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return Exported(
        program.graph,
        program.graph_signature.input_specs,
        program.constants,
        program.call_spec.out_spec,
        frozenset(assigned),
        {} if shared is None else shared.runs,
        TraceReport() if shared is None else TraceReport(tuple(shared.traces)),
    )


def _free_shapes(model: nn.Module, inputs: Any, free: Collection[LeafDim]) -> Any:
    shapes = ShapesCollection()
    for position, leaf in enumerate(pytree.tree_leaves(inputs)):
        if dims := {dim: Dim.AUTO for at, dim in free if at == position}:
            shapes[leaf] = dims
    return shapes.dynamic_shapes(model, *inputs)
