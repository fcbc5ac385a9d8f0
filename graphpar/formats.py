"""formats: a program as Python, as JSON or as a Graphviz graph."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx

from graphpar.printer import (
    attribute_of,
    described,
    expression,
    format_python,
    is_graphpar,
    target_name,
)
from graphpar.program import Program, info, is_getitem
from graphpar.types import Shard, Type


def to_data(program: Program) -> dict[str, Any]:
    """The program as plain data; the schema is in ``docs/dump.md``."""
    return {
        "version": 1,
        "ranks": program.ranks,
        "form": program.form,
        "graphs": [
            {
                "name": name or "forward",
                "calls": [p for p, b in program.calls.items() if name and b == name],
                "nodes": [_node_data(program, node) for node in graph.nodes],
            }
            for name, graph in program.graphs()
        ],
        "state": [
            {
                "name": name,
                "names": list(state.names),
                "kind": state.kind,
                "shape": list(state.spec.shape),
                "dtype": str(state.spec.dtype).removeprefix("torch."),
                "type": _type_data(state.type),
            }
            for name, state in program.state.items()
        ],
    }


def _node_data(program: Program, node: fx.Node) -> dict[str, Any]:
    known = info(node)
    specs = known.spec if isinstance(known.spec, tuple) else (known.spec,)
    kinds = known.type if isinstance(known.type, tuple) else (known.type,) * len(specs)
    return {
        "name": node.name,
        "op": node.op,
        "target": target_name(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else "getitem"
        if is_getitem(node)
        else str(node.target),
        "inputs": [n.name for n in node.all_input_nodes],
        "args": [expression(a, _raw) for a in node.args],
        "kwargs": {k: expression(v, _raw) for k, v in node.kwargs.items()},
        "outputs": [
            None
            if s is None
            else {
                "shape": list(s.shape),
                "dtype": str(s.dtype).removeprefix("torch."),
                "type": _type_data(k),
            }
            for s, k in zip(specs, kinds, strict=True)
        ],
        "source": {
            "file": known.source.file,
            "line": known.source.line,
            "module": known.source.module,
        },
        "origin": known.origin,
    }


def _raw(node: fx.Node) -> str:
    return attribute_of(node) if node.op == "get_attr" else node.name


def _type_data(kind: Type | None) -> dict[str, Any] | None:
    if kind is None:
        return None
    if isinstance(kind, Shard):
        fields = {"dim": kind.dim, "blocks": list(kind.blocks), "units": kind.units}
        return {"kind": "Shard", **fields, "axis": kind.axis}
    return {"kind": str(kind)}


def format_json(program: Program) -> str:
    return json.dumps(to_data(program), indent=1, ensure_ascii=False) + "\n"


_COLORS = {"I": "white", "R": "lightyellow", "S": "lightblue", "P": "mistyrose"}


def format_dot(program: Program) -> str:
    """The program for Graphviz: a cluster per block, coloured by type, collectives in bold."""
    lines = ["digraph program {", "  rankdir=TB; node [shape=box, style=filled, fontsize=10];"]
    for number, (name, graph) in enumerate(program.graphs()):
        lines.append(f"  subgraph cluster_{number} {{")
        title = f"{name} × {program.call_count(name)}" if name else "forward"
        lines.append(f"    label={json.dumps(title, ensure_ascii=False)};")
        for node in graph.nodes:
            lines.append(f"    {_dot_node(program, node, number)}")
        for node in graph.nodes:
            for value in node.all_input_nodes:
                lines.append(f"    n{number}_{value.name} -> n{number}_{node.name};")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _dot_node(program: Program, node: fx.Node, number: int) -> str:
    target = node.target
    is_op = isinstance(target, torch._ops.OpOverload)
    text = target_name(target) if is_op else str(target) if node.op != "output" else "output"
    if is_getitem(node):
        text = f"[{node.args[1]}]"
    facts = described(program, node) if info(node).spec is not None else ""
    kind = info(node).type
    color = _COLORS.get(str(kind)[:1], "white") if not isinstance(kind, tuple) else "white"
    bold = is_graphpar(target)
    label = json.dumps(f"{node.name}\n{text}\n{facts}", ensure_ascii=False)
    return (
        f"n{number}_{node.name} [label={label}, fillcolor={color}"
        + (", penwidth=3" if bold else "")
        + "];"
    )


FORMATS = {"py": format_python, "json": format_json, "dot": format_dot}
