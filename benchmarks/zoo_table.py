"""What the partitioner makes of every model of the zoo.

    python benchmarks/zoo_table.py [--tp 2] [--json FILE] [NAME ...]

For each model, without and with sequence parallelism: the share of its parameters and of its
products' work that is sharded, the collectives of activations in its largest block (forward), ops
that have no rule, and the largest difference of a gradient from the original's (in float64;
grouped products have no kernel for it).
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from _common import report, table, write_json
from torch import fx, nn

from graphpar.errors import GraphparWarning
from graphpar.ops import is_conversion
from graphpar.passes.annotate.price import flops_of
from graphpar.passes.rules import rule_for, tensor_arguments
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, info, is_getitem
from graphpar.testing import compare
from graphpar.trace import trace
from graphpar.types import Shard
from tests import zoo
from tests.zoo.precise import float64_inside

SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
QUIET = ("convert", "shard", "pad")


def sharded_parameters(program: Program) -> float:
    states = [s for s in program.state.values() if s.kind == "parameter"]
    cut = sum(s.spec.numel for s in states if isinstance(s.type, Shard))
    return cut / sum(s.spec.numel for s in states)


def sharded_work(typed: Program, *, in_layers: bool) -> float:
    """Of the multiply-adds of products, those whose operands are sharded."""
    total = cut = 0
    for block, graph in typed.graphs():
        if in_layers and not block and typed.blocks:
            continue
        for node in graph.nodes:
            work = flops_of(node) * typed.call_count(block)
            total += work
            cut += work * any(isinstance(info(n).type, Shard) for n in _operands(node, work))
    return cut / total if total else 1.0


def _operands(node: fx.Node, work: int) -> list[fx.Node]:
    return tensor_arguments(node) if work else []


def collectives(program: Program) -> str:
    """Of activations, in the largest block (or the root), in forward."""
    graphs = dict(program.blocks) or {"": program.graph}
    graph = max(graphs.values(), key=lambda g: len(g.nodes))
    found = Counter(
        str(n.target._schema.name).split("::")[1]
        for n in graph.nodes
        if is_conversion(n.target) and n.args[0].op != "get_attr"
    )
    return " ".join(f"{n} {SHORT[op]}" for op, n in sorted(found.items()) if op not in QUIET)


def row(name: str, traced: Program, model: nn.Module, kwargs: Any, tp: int, sp: bool) -> list[str]:
    stages = run_pipeline(traced, default_pipeline(tp=tp, sp=sp, rng="exact", overlap=False))
    last = list(stages.values())[-1]
    with float64_inside():
        found = compare(last, model, (), kwargs, atol=1e-4, rtol=1e-4)
    calls = [n for n in traced.graph.nodes if n.op == "call_function" and not is_getitem(n)]
    opaque = sorted({str(n.target) for n in calls if rule_for(n.target) is None})
    typed = stages["insert-collectives"]
    return [
        name,
        "yes" if sp else "no",
        f"{100 * sharded_parameters(last):.0f}",
        f"{100 * sharded_work(typed, in_layers=False):.1f}",
        f"{100 * sharded_work(typed, in_layers=True):.1f}",
        collectives(last) or "–",
        ", ".join(opaque) or "–",
        f"{found.worst:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    options = parser.parse_args()
    warnings.simplefilter("ignore", GraphparWarning)
    rows = []
    for name in options.names or [*zoo.BUILDERS, *zoo.MORE]:
        model, kwargs = zoo.build_double(name)
        with float64_inside():
            traced = trace(model, (), kwargs)
        for sp in (False, True):
            rows.append(row(name, traced, model, kwargs, options.tp, sp))
            print(" | ".join(rows[-1]), flush=True)
    head = [
        "model", "sp", "parameters, %", "work, %", "in layers, %", "collectives of a layer",
        "no rule", "largest difference",
    ]  # fmt: skip
    write_json(options.json, [dict(zip(head, each, strict=True)) for each in rows])
    report(
        "zoo_table" if not options.names else "zoo_part",
        f"The zoo, tp={options.tp}",
        table(head, rows),
    )


if __name__ == "__main__":
    main()
