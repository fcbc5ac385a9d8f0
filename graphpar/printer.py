"""printer: a program as runnable Python.

The Python form is also what a :class:`graphpar.ParallelModule` executes. It depends on the
program alone: no timings, the same text on every run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphpar.axes import format_dim
from graphpar.native import native_name
from graphpar.ops.library import READ_PARAMETERS
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
    region_again,
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

_DEFINED_IN = {
    "graphpar_rnn": "graphpar.codegen.sparse_rnn.recurrence",
    "graphpar_state": "graphpar.snapshots",
}
"""The modules that define our ops beside ``graphpar.ops``, by namespace."""

_GLOBALS = {"aten", "device", "forward", "graphpar", "inf", "nan", "ops", "self", "torch", "tp"}
_GLOBALS |= {"local", "local_all", "module_at", "state_at"}
_GLOBALS |= {"made", "hold"}  # in regions

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
    its part of parameters with ``local``, drops values after their last use, calls torch's own
    functions where it has them (:mod:`graphpar.native`), and submodules, so that their hooks run.
    """
    parts = [_header(program)]
    constants = [name for name, s in program.state.items() if s.kind == "constant"]
    if constants and rank is None:
        parts.append(
            "\n".join(f"# {n}: {_tensor(program, program.state[n].spec, None)}" for n in constants)
        )
    for name, graph in program.graphs():
        parts.append("\n".join(_function(program, name, graph, rank)))
    return "\n\n".join(parts) + "\n"


def _header(program: Program) -> str:
    targets = (n.target for _, graph in program.graphs() for n in graph.nodes)
    spaces = {t.namespace for t in targets if isinstance(t, torch._ops.OpOverload)}
    modules = [module for space, module in _DEFINED_IN.items() if space in spaces]
    own = "from graphpar import ops\n"
    return HEADER.replace(own, "".join([*(f"import {m}\n" for m in modules), own]))


def _local(program: Program, name: str) -> str:
    """The variable of a node: no name that means something else in the text."""
    bare = name.rstrip("_")
    taken = bare in _GLOBALS or bare in program.blocks or re.fullmatch(r"(region|again)_\d+", bare)
    return f"{name}_" if taken or is_constant(bare) else name


def _names(program: Program, nodes: Iterable[fx.Node | str]) -> list[str]:
    return [_local(program, n if isinstance(n, str) else n.name) for n in nodes]


def _locals(program: Program, nodes: Iterable[fx.Node | str]) -> str:
    return ", ".join(_names(program, nodes))


def _function(program: Program, name: str, graph: fx.Graph, rank: int | None) -> Iterator[str]:
    entries = _locals(program, placeholders(graph))
    arguments = f"self, {entries}" if entries else "self"
    note = f"  # × {program.call_count(name)}: {_calls(program, name)}" if name else ""
    yield f"def {name or 'forward'}({arguments}):{note}"
    for node in placeholders(graph):
        yield f"    # {_local(program, node.name)}: {described(program, node)}"
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
    ways: Mapping[fx.Node, str] = MappingProxyType({}),
) -> tuple[list[str], str]:
    """The lines of consecutive nodes, and the source line that the last of them comes from."""
    lines = []
    for node in nodes:
        line = _statement(program, node, rank, ways)
        if line is None:
            continue
        if node.op != "output" and str(info(node).source) != source:
            source = str(info(node).source)
            lines.append(f"# {source}")
        comment = "" if node.op == "output" else f"  # {described(program, node)}"
        lines.append(line + comment)
        if last.get(node):
            lines.append(f"del {_locals(program, last[node])}")
    return lines, source


def _region(
    program: Program,
    region: Region,
    nodes: Sequence[fx.Node],
    last: Mapping[fx.Node, Sequence[fx.Node]],
    rank: int | None,
) -> Iterator[str]:
    """The functions that forward and backward call, and the call."""
    again, held = region_again(nodes)
    results, entries = region_results(nodes), [*region.kept, *region.passed]
    called = [node for node in again if not is_getitem(node)]
    ways = {node: f"made({i}, " for i, node in enumerate(called)}
    ways |= {node: "hold(" for node in nodes if info(node).held}
    outside = {*entries, *(n.name for n in results)}
    to_the_end = {*outside, *(n.name for n in held)}
    inner = {n: [v for v in last.get(n, ()) if v.name not in to_the_end] for n in nodes}
    first, second = f"region_{region.number}", f"again_{region.number}"
    yield f"    def {first}({', '.join(['made', 'hold', *_names(program, entries)])}):"
    yield from (f"        {line}" for line in _body(program, nodes, inner, rank, ways=ways)[0])
    yield f"        return [{_locals(program, results)}], [{_locals(program, held)}]"
    yield f"    def {second}({', '.join(['made', *_names(program, [*region.kept, *held])])}):"
    yield from (f"        {line}" for line in _again(program, again, rank, ways))
    arguments = [first, second, f"[{_locals(program, region.kept)}]"]
    if region.passed:
        arguments.append(f"[{_locals(program, region.passed)}]")
    if region.random:
        arguments.append("random=True")
    if any(info(node).held for node in nodes):
        arguments.append("holds=True")
    call = f"ops.recompute({', '.join(arguments)})"
    yield f"    {_locals(program, results)}, = {call}" if results else f"    {call}"
    ended = [v for n in nodes for v in last.get(n, ()) if v.name in outside]
    if ended:
        yield f"    del {_locals(program, ended)}"


def _again(
    program: Program, nodes: Sequence[fx.Node], rank: int | None, ways: Mapping[fx.Node, str]
) -> Iterator[str]:
    """The lines of a region's second run."""
    last = {value: node for node in nodes for value in (node, *node.all_input_nodes)}
    for node in nodes:
        statement = _statement(program, node, rank, ways)
        assert statement is not None
        yield statement
        ended = [value for value in nodes if last[value] is node]
        if ended and rank is not None:
            yield f"del {_locals(program, ended)}"


def _calls(program: Program, block: str) -> str:
    paths = [path for path, name in program.calls.items() if name == block]
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"


def _statement(
    program: Program,
    node: fx.Node,
    rank: int | None,
    ways: Mapping[fx.Node, str],
) -> str | None:
    """The call of a node, by the way that it is to take."""
    whole = reads_parameters(node)

    def show(value: Any) -> str:
        if rank is not None and not whole and _is_state_alone(value):
            return f"local_all({', '.join(attribute_of(v, rank) for v in value)})"
        return expression(of_rank(value, rank) if rank is not None else value, named)

    def named(value: fx.Node) -> str:
        if value.op != "get_attr":
            return _local(program, value.name)
        if whole and value is not node.args[0] and not _is_padded(value):
            return attribute_of(value, rank)
        return _state(value, rank, program.ranks)

    if node.op in ("placeholder", "get_attr"):
        return None
    if node.op == "output":
        return f"return [{', '.join(map(show, outputs(node.graph)))}]"
    name = _local(program, node.name)
    if node.op == "call_module":
        block, path = program.calls[str(node.target)], str(node.target)
        values = "".join(f", {show(a)}" for a in node.args)
        if rank is not None:
            return f"{name} = {_found('module_at', path)}({block}{values})"
        return f"{name} = {block}({_attribute('self', path)}{values})"
    if is_getitem(node):
        return f"{name} = {show(node.args[0])}[{node.args[1]}]"
    shown = [show(a) for a in node.args]
    if is_graphpar(node.target) and MESH_DIM in node.args:
        place = node.args.index(MESH_DIM)
        names = [a.name for a in node.target._schema.arguments[place + 1 :]]  # type: ignore[union-attr]
        after = [f"{key}={value}" for key, value in zip(names, shown[place + 1 :], strict=False)]
        shown = [*shown[:place], MESH_DIM, *after]
    shown += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
    target = target_name(node.target)
    if rank is not None:
        target = native_name(node.target) or target  # type: ignore[arg-type]
    if node in ways:
        return f"{name} = {ways[node]}{', '.join([target, *shown])})"
    return f"{name} = {target}({', '.join(shown)})"


def target_name(target: Any) -> str:
    assert isinstance(target, torch._ops.OpOverload)
    space = {"aten": "aten", "graphpar": "ops"}.get(target.namespace)
    name = _bare_name(target)
    if space == "ops":
        return f"ops.{name}"
    prefix = space or f"torch.ops.{target.namespace}"
    return f"{prefix}.{name}.{target._overloadname}"


def _bare_name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[1]


def expression(value: Any, named: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return named(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(expression(v, named) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    return repr(value)


def is_graphpar(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "graphpar"


def _state(node: fx.Node, rank: int | None, ranks: int) -> str:
    """What a ``get_attr`` node reads; running code takes the local tensor of a DTensor, without
    the padding that uneven parts have."""
    attribute, kind = attribute_of(node, rank), info(node).type
    if rank is None or is_constant(str(node.target)):
        return attribute
    if isinstance(kind, Shard) and _is_padded(node):
        return f"local({attribute}, {kind.dim}, {local_size(kind, rank, ranks)})"
    return f"local({attribute})"


def reads_parameters(node: fx.Node) -> bool:
    """Whether an op takes parameters as they are."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not is_graphpar(target):
        return False
    return _bare_name(target) in READ_PARAMETERS


def _is_padded(state: fx.Node) -> bool:
    return bool(getattr(info(state).type, "units", 0))


def _is_state_alone(value: Any) -> bool:
    """Whether an argument is several parameters, none of them padded: they are read at once."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return False
    return all(
        isinstance(v, fx.Node)
        and v.op == "get_attr"
        and not is_constant(str(v.target))
        and not _is_padded(v)
        for v in value
    )


def attribute_of(node: fx.Node, rank: int | None = None) -> str:
    """A parameter or buffer of ``self``; constants are globals. ``rank``: as running code reads
    it, whose attributes of modules would each be a Python call."""
    name = str(node.target)
    if is_constant(name):
        return name
    return _attribute("self", name) if rank is None else _found("state_at", name)


def is_constant(name: str) -> bool:
    """Whether a state name is that of a constant, which trace numbers."""
    return re.fullmatch(r"constant_\d+", name) is not None


def _attribute(owner: str, path: str) -> str:
    """``self.a[0].b``: the state or module at a path of names and numbers."""
    for part in path.split("."):
        owner += f".{part}" if part.isidentifier() else f"[{part!r}]"
    return re.sub(r"\['(\d+)'\]", r"[\1]", owner)


def _found(function: str, path: str) -> str:
    return f"{function}(self, {', '.join(map(repr, path.split('.')))})"


def described(program: Program, node: fx.Node) -> str:
    kind, spec = info(node).type, info(node).spec
    origin = "" if info(node).origin in ("trace", "outline") else f"  {info(node).origin}"
    if info(node).replay:
        origin += "  again in backward"
    if info(node).held:
        origin += "  held for backward"
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
