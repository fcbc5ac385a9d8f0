"""How many collectives a program runs, read off the types of its conversions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpar.cli.output import table
from graphpar.ops import is_conversion, signature
from graphpar.ops.sharded import ALL_REDUCES
from graphpar.passes.rules import FORMS, is_form, whole_op
from graphpar.program import Program, info, tensor_spec
from graphpar.types import CONVERSIONS, letter
from graphpar.unfuse import is_fused

_ops = torch.ops.graphpar


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one call of a graph, by name: those that activations need and those
    that parameters need, in forward and in backward."""

    block: str
    calls: int
    activations: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )
    parameters: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )


def count_collectives(program: Program) -> list[Collectives]:
    """One row per block, then one for the root."""
    return [_count(program, name, graph) for name, graph in program.graphs()]


def _count(program: Program, block: str, graph: fx.Graph) -> Collectives:
    found = Collectives(block, program.call_count(block))
    of_parameters: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_parameter(program, block, node, of_parameters):
            of_parameters.add(node)
        if is_form(node.target):
            _count_within(node, found)
        if is_fused(node):
            _count_fused(node, found)
        if not is_conversion(node.target):
            continue
        source, target = signature(node.target, node.args[1:])
        forward, backward = CONVERSIONS[letter(source), letter(target)]
        counts = found.parameters if node in of_parameters else found.activations
        if forward:
            counts[0][forward] += 1
            counts[1][forward] += info(node).replay  # again in backward
        if backward and tensor_spec(node).differentiable:
            counts[1][backward] += 1
    return found


def _count_within(node: fx.Node, found: Collectives) -> None:
    """Add what an op on shards reduces by itself."""
    sides = ALL_REDUCES.get(FORMS[whole_op(node.target)], (0, 0))
    for counts, count in zip(found.activations, sides, strict=True):
        if count and (counts is found.activations[0] or tensor_spec(node).differentiable):
            counts["all_reduce"] += count
    found.activations[1]["all_reduce"] += sides[0] * info(node).replay


def _count_fused(node: fx.Node, found: Collectives) -> None:
    """Add what a fused op runs: what it gathers, once more in backward, whether it keeps the shard
    or is run again; and one sum of the gradients of parameters for each dtype."""
    operands, forward, backward = node.all_input_nodes, *found.activations
    trained = [tensor_spec(n) for n in operands if tensor_spec(n).differentiable]
    of_first = tensor_spec(operands[0]).differentiable
    if node.target is _ops.convert_many.default:
        found.parameters[1]["all_reduce"] += len({spec.dtype for spec in trained})
    elif node.target is _ops.convert_linear.default:
        backward["all_reduce"] += of_first
    elif node.target is _ops.gather_linear.default:
        forward["all_gather"] += 1
        backward["all_gather"] += any(
            isinstance(w, fx.Node) and tensor_spec(w).differentiable
            for w in node.args[1]  # type: ignore[union-attr]
        )
        backward["reduce_scatter"] += of_first
    else:
        forward["reduce_scatter"] += 1
        backward["reduce_scatter"] += info(node).replay
        backward["all_gather"] += bool(trained)


def _is_parameter(program: Program, block: str, node: fx.Node, known: set[fx.Node]) -> bool:
    """Whether a value is a parameter, or made of parameters alone (a cast, a transpose)."""
    if node.op == "get_attr":
        return program.state[program.state_name(block, node)].kind == "parameter"
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and known.issuperset(inputs)


def format_counts(program: Program) -> str:
    """A table of the collectives of every block, for people."""
    if program.form == "whole":
        rows = [["block", "calls", "ops"]]
        for name, graph in program.graphs():
            ops = sum(node.op == "call_function" for node in graph.nodes)
            rows.append([name or "forward", f"× {program.call_count(name)}", str(ops)])
        return table(rows)
    rows = [["block", "calls", "", "activations", "parameters"]]
    for each in count_collectives(program):
        head = [each.block or "forward", f"× {each.calls}"]
        for side, name in enumerate(("forward", "backward")):
            rows.append([*head, name, _list(each.activations[side]), _list(each.parameters[side])])
            head = ["", ""]
    return table(rows)


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "–"


def most_called(program: Program) -> str:
    """The block that runs most often, the first of these; "" if the program has none."""
    return max(program.blocks, key=program.call_count, default="")


def format_report(program: Program) -> str:
    """How repeated layers were traced, what became of recurrences, and what the choice of
    recomputation and the partitioner report."""
    traced = program.report.get("trace")
    lines = [] if traced is None else list(traced.lines())
    lines += [
        f"{name}: {decision}" for name, decision in program.report.get("sparse_rnn", {}).items()
    ]
    if "recompute" in program.report:
        lines.append(str(program.report["recompute"]))
    if found := program.report.get("partition"):
        lines += _waste(found)
        lines.append(
            f"partition: {found['objective_us']:.1f} us modelled per step, "
            f"bound {found['bound_us']:.1f} us, solved in {found['seconds']:.2f} s"
        )
    return "\n".join(lines)


def _waste(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for axis in found["uneven"]:
        lines.append(f"uneven: {axis.size} of {axis.axis}, {axis.most} or {axis.least} on a rank")
    for product in found["replicated"]:
        lines.append(f"whole on every rank: {product.op} at {product.source}")
    if found["wasted"]:
        lines.append(f"wasted by these: {found['wasted']:.1%} of all ranks' work in products")
    return lines
