"""annotate_partitions: choose one partition type per value, with the least modelled time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphpar.cost import CostModel
from graphpar.errors import GraphparWarning
from graphpar.passes.annotate.candidates import Candidates, find_candidates
from graphpar.passes.annotate.gathers import forced_gathers
from graphpar.passes.annotate.model import Model
from graphpar.passes.annotate.waste import replicated_products, uneven_axes
from graphpar.program import Program, copy_program, info
from graphpar.types import Type

NAME = "annotate-partitions"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatePartitions:
    """``tp`` ranks; ``sp`` lets token axes be sharded; ``cost`` prices ops and collectives;
    ``state_types`` are types that parameters must have."""

    tp: int
    sp: bool = False
    cost: CostModel = field(default_factory=CostModel)
    state_types: Mapping[str, Type] | None = None


def _waste(program: Program, model: Model, ranks: int) -> dict[str, Any]:
    uneven = uneven_axes(program, model.flops, ranks)
    replicated = replicated_products(program, model.flops, ranks)
    wasted = sum(u.flops for u in uneven) + sum(r.flops for r in replicated)
    share = wasted / (model.total + wasted) if wasted else 0.0
    return {"uneven": uneven, "replicated": replicated, "wasted": share}


def _nothing_sharded(candidates: Candidates, ranks: int) -> str:
    if candidates.features or candidates.tokens:
        return "nothing was sharded: to cut any axis costs more in communication than it saves"
    if candidates.most == 1:
        return "nothing was sharded: the model has no axis that may be cut"
    return (
        f"nothing was sharded: no axis that may be cut has tp={ranks} elements; legal: "
        f"1 to {candidates.most}"
    )


def annotate_partitions(program: Program, options: AnnotatePartitions) -> Program:
    """Decide a type for every value and what type every op needs of its operands.

    One integer program over all distinct blocks and the root, each block weighted by its number
    of calls, solved to optimality by HiGHS. Products that hold at least a thousandth of the
    work are sharded wherever a rule allows it; the residual stream between blocks is sharded
    along the sequence (else the batch) with ``sp``, and Invariant without.

    Needs: named axes. Ensures: ``Info.type`` on every value, ``Info.operands`` on every op and
    call. ``Program.report["partition"]`` has objective, bound and seconds, the axes that are cut
    unevenly, the products that all ranks do whole, and what share of all ranks' work in products
    is wasted by the two. Numerics: bitwise.
    """
    program = copy_program(program)
    candidates = find_candidates(program, options.tp, sp=options.sp)
    model = Model(program, candidates, options.tp, options.cost, options.state_types or {})
    report = model.solve() | _waste(program, model, options.tp)
    if not model.sharded:
        warnings.warn(_nothing_sharded(candidates, options.tp), GraphparWarning, stacklevel=2)
    for node, axis in forced_gathers(program, candidates.features, options.tp):
        warnings.warn(
            f"{node.target} needs the axis {axis} whole, which is sharded: its input is gathered"
            f"\n  at {info(node).source}",
            GraphparWarning,
            stacklevel=2,
        )
    return program.with_graphs(
        dict(program.graphs()), ranks=options.tp, report={**program.report, "partition": report}
    )
