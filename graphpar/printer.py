"""printer: a program as runnable Python, as JSON or as a Graphviz graph.

The Python form is also what a :class:`graphpar.ParallelModule` executes. It depends on the
program alone: no timings, the same text on every run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from graphpar.axes import format_dim
from graphpar.program import (
    MESH_DIM,
    Program,
    Region,
    TensorSpec,
    info,
    is_getitem,
    last_uses,
    of_rank,
    outputs,
    placeholders,
    region_results,
)
from graphpar.types import I, Shard, Type, local_shape, local_size

HEADER = """\
import torch
from torch import device

from graphpar import ops

aten = torch.ops.aten
inf, nan = float("inf"), float("nan")
"""

_SHORT = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
}


def format_python(program: Program, *, rank: int | None = None) -> str:
    """The program as a Python module: one function per block, then ``forward(self, …)``.

    ``self`` is a module that has the program's state under its names; a block's ``self`` is the
    called submodule. The program's constants and ``tp``, the name of a process group, are globals
    that the caller gives. ``rank``: the form that runs on that rank, with its sizes, which takes
    its part of parameters with ``local``, drops values after their last use and calls submodules,
    so that their hooks run.
    """
    parts = [HEADER]
    constants = [name for name, s in program.state.items() if s.kind == "constant"]
    if constants and rank is None:
        parts.append(
            "\n".join(f"# {n}: {_tensor(program, program.state[n].spec, None)}" for n in constants)
        )
    for name, graph in program.graphs():
        parts.append("\n".join(_function(program, name, graph, rank)))
    return "\n\n".join(parts) + "\n"


def _function(program: Program, name: str, graph: fx.Graph, rank: int | None) -> Iterator[str]:
    arguments = ", ".join(["self", *(n.name for n in placeholders(graph))])
    note = f"  # × {program.call_count(name)}: {_calls(program, name)}" if name else ""
    yield f"def {name or 'forward'}({arguments}):{note}"
    for node in placeholders(graph):
        yield f"    # {node.name}: {_described(program, node)}"
    last = {} if rank is None else last_uses(graph)
    source = ""
    for region, nodes in groupby(list(graph.nodes), lambda n: info(n).region):
        if region is None:
            lines, source = _body(program, nodes, last, rank, source)
            yield from (f"    {line}" for line in lines)
        else:
            yield from _region(program, region, list(nodes), last, rank)
            source = ""


def _body(
    program: Program,
    nodes: Iterable[fx.Node],
    last: Mapping[fx.Node, Sequence[fx.Node]],
    rank: int | None,
    source: str = "",
) -> tuple[list[str], str]:
    """The lines of consecutive nodes, and the source line that the last of them comes from."""
    lines = []
    for node in nodes:
        line = _statement(program, node, rank)
        if line is None:
            continue
        if node.op != "output" and str(info(node).source) != source:
            source = str(info(node).source)
            lines.append(f"# {source}")
        comment = "" if node.op == "output" else f"  # {_described(program, node)}"
        lines.append(line + comment)
        if last.get(node):
            lines.append(f"del {', '.join(n.name for n in last[node])}")
    return lines, source


def _region(
    program: Program,
    region: Region,
    nodes: Sequence[fx.Node],
    last: Mapping[fx.Node, Sequence[fx.Node]],
    rank: int | None,
) -> Iterator[str]:
    """A function that backward calls again, and its call."""
    results = [n.name for n in region_results(nodes)]
    given = {*region.kept, *region.passed, *results}
    ended = [n.name for node in nodes for n in last.get(node, ())]
    inner = {node: [n for n in last.get(node, ()) if n.name not in given] for node in nodes}
    name = f"region_{region.number}"
    yield f"    def {name}({', '.join(['run', *region.kept, *region.passed])}):"
    yield from (f"        {line}" for line in _body(program, nodes, inner, rank)[0])
    yield f"        return [{', '.join(results)}]"
    arguments = [name, f"[{', '.join(region.kept)}]"]
    if region.passed:
        arguments.append(f"[{', '.join(region.passed)}]")
    if region.random:
        arguments.append("random=True")
    call = f"ops.recompute({', '.join(arguments)})"
    yield f"    {', '.join(results)}, = {call}" if results else f"    {call}"
    ended = [n for n in ended if n in given]
    if ended:
        yield f"    del {', '.join(ended)}"


def _calls(program: Program, block: str) -> str:
    paths = [path for path, name in program.calls.items() if name == block]
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"


def _statement(program: Program, node: fx.Node, rank: int | None) -> str | None:
    def show(value: Any) -> str:
        return _expression(of_rank(value, rank) if rank is not None else value, state)

    def state(node: fx.Node) -> str:
        return _state(node, rank, program.ranks)

    if node.op in ("placeholder", "get_attr"):
        return None
    if node.op == "output":
        return f"return [{', '.join(map(show, outputs(node.graph)))}]"
    if node.op == "call_module":
        block, module = program.calls[str(node.target)], _attribute("self", str(node.target))
        values = "".join(f", {show(a)}" for a in node.args)
        if rank is not None:
            return f"{node.name} = {module}({block}{values})"
        return f"{node.name} = {block}({module}{values})"
    if is_getitem(node):
        return f"{node.name} = {show(node.args[0])}[{node.args[1]}]"
    shown = [show(a) for a in node.args]
    if is_graphpar(node.target) and MESH_DIM in node.args:
        place = node.args.index(MESH_DIM)
        names = [a.name for a in node.target._schema.arguments[place + 1 :]]  # type: ignore[union-attr]
        after = [f"{name}={value}" for name, value in zip(names, shown[place + 1 :], strict=False)]
        shown = [*shown[:place], MESH_DIM, *after]
    shown += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
    target = _target(node.target)
    if info(node).region is not None and not info(node).replay:
        return f"{node.name} = run({', '.join([target, *shown])})"
    return f"{node.name} = {target}({', '.join(shown)})"


def _target(target: Any) -> str:
    assert isinstance(target, torch._ops.OpOverload)
    space = {"aten": "aten", "graphpar": "ops"}.get(target.namespace)
    name = target._schema.name.split("::")[1]
    if space == "ops":
        return f"ops.{name}"
    prefix = space or f"torch.ops.{target.namespace}"
    return f"{prefix}.{name}.{target._overloadname}"


def _expression(value: Any, state: Callable[[fx.Node], str] | None = None) -> str:
    if isinstance(value, fx.Node):
        return (state or _attribute_of)(value) if value.op == "get_attr" else value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_expression(v, state) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    return repr(value)


def is_graphpar(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "graphpar"


def _state(node: fx.Node, rank: int | None, ranks: int) -> str:
    """What a ``get_attr`` node reads; running code takes the local tensor of a DTensor, without
    the padding that uneven parts have."""
    attribute, kind = _attribute_of(node), info(node).type
    if rank is None or is_constant(str(node.target)):
        return attribute
    if isinstance(kind, Shard) and kind.units:
        return f"local({attribute}, {kind.dim}, {local_size(kind, rank, ranks)})"
    return f"local({attribute})"


def _attribute_of(node: fx.Node) -> str:
    """A parameter or buffer of ``self``; constants are globals."""
    name = str(node.target)
    return name if is_constant(name) else _attribute("self", name)


def is_constant(name: str) -> bool:
    """Whether a state name is that of a constant, which trace numbers."""
    return re.fullmatch(r"constant_\d+", name) is not None


def _attribute(owner: str, path: str) -> str:
    """``self.a[0].b``: the state or module at a path of names and numbers."""
    for part in path.split("."):
        owner += f".{part}" if part.isidentifier() else f"[{part!r}]"
    return re.sub(r"\['(\d+)'\]", r"[\1]", owner)


def _described(program: Program, node: fx.Node) -> str:
    kind, spec = info(node).type, info(node).spec
    origin = "" if info(node).origin in ("trace", "outline") else f"  {info(node).origin}"
    if info(node).replay:
        origin += "  again in backward"
    if isinstance(spec, tuple):
        kinds = kind if isinstance(kind, tuple) else (None,) * len(spec)
        each = [_tensor(program, s, k) for s, k in zip(spec, kinds, strict=True)]
        return f"({', '.join(each)}){origin}"
    return _tensor(program, spec, kind) + _axes(node) + origin  # type: ignore[arg-type]


def _axes(node: fx.Node) -> str:
    """The axes of each dimension, until types tell what becomes of them."""
    dims = info(node).dims
    if info(node).type is not None or not dims:
        return ""
    return f" ({', '.join(format_dim(dim) for dim in dims)})"  # type: ignore[arg-type]


def _tensor(program: Program, spec: TensorSpec | None, kind: Type | None) -> str:
    if spec is None:
        return "None"
    ranks = program.ranks if program.form == "local" else 1
    most, least = (local_shape(spec.shape, kind or I, r, ranks) for r in (0, ranks - 1))
    sizes = [f"{a} or {b}" if a != b else str(a) for a, b in zip(most, least, strict=True)]
    return f"{_dtype(spec.dtype)}[{', '.join(sizes)}]" + (f" {kind}" if kind else "")


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    match = re.fullmatch(r"([a-z]+)(\d+)", name)
    return _SHORT.get(match[1], match[1]) + match[2] if match else name


# --- data ---------------------------------------------------------------------------------------


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
        "target": _target(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else "getitem"
        if is_getitem(node)
        else str(node.target),
        "inputs": [n.name for n in node.all_input_nodes],
        "args": [_expression(a) for a in node.args],
        "kwargs": {k: _expression(v) for k, v in node.kwargs.items()},
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
    text = _target(target) if is_op else str(target) if node.op != "output" else "output"
    if is_getitem(node):
        text = f"[{node.args[1]}]"
    described = _described(program, node) if info(node).spec is not None else ""
    kind = info(node).type
    color = _COLORS.get(str(kind)[:1], "white") if not isinstance(kind, tuple) else "white"
    bold = is_graphpar(target)
    label = json.dumps(f"{node.name}\n{text}\n{described}", ensure_ascii=False)
    return (
        f"n{number}_{node.name} [label={label}, fillcolor={color}"
        + (", penwidth=3" if bold else "")
        + "];"
    )


FORMATS = {"py": format_python, "json": format_json, "dot": format_dot}
