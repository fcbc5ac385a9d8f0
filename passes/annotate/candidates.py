"""Which axes may be sharded: the roles of axes, found from the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from graphpar.axes import Axis, Dims, axes_of
from graphpar.cost import is_contraction
from graphpar.passes.rules import tensor_arguments
from graphpar.program import (
    Program,
    TensorSpec,
    flat_nodes,
    info,
    is_tensor,
    outputs,
    placeholders,
    tensor_spec,
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """``features`` may be cut anywhere, ``tokens`` outside products only.

    ``parameters`` are the axes of parameters: a product is cut along one of those if it can be,
    so that weights are sharded rather than gathered (those that a router looks up, too).
    ``weights`` are those of products among them.
    ``residual`` are the values that carry the residual stream into and out of blocks, with the
    token axis they must be cut along (``None``: they stay Invariant). ``most`` is the largest tp
    that would divide something, for messages.
    """

    features: frozenset[Axis]
    tokens: frozenset[Axis]
    parameters: frozenset[Axis]
    weights: frozenset[Axis]
    residual: dict[fx.Node, Axis | None]
    most: int


def axes_in(dims: Dims) -> Iterator[Axis]:
    for dim in dims:
        yield from axes_of(dim)


def _dims(node: fx.Node) -> Dims:
    dims = info(node).dims
    assert dims is not None
    return dims  # type: ignore[return-value]


def _differentiable(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.differentiable


def _residual(program: Program) -> list[fx.Node]:
    """The outputs of blocks that have the axes of one of their inputs, and those inputs."""
    found: list[fx.Node] = []
    for graph in program.blocks.values():
        entries = [n for n in placeholders(graph) if _differentiable(n) and len(_dims(n)) > 1]
        exits = [n for n in flat_nodes(outputs(graph)) if _differentiable(n)]
        shared = {_dims(n) for n in entries} & {_dims(n) for n in exits}
        found += [n for n in (*entries, *exits) if _dims(n) in shared]
    return found


def _parameter_axes(program: Program) -> Iterator[Axis]:
    for name, graph in program.graphs():
        for node in graph.nodes:
            if node.op == "get_attr" and _is_parameter(program, name, node):
                yield from axes_in(_dims(node))


def _is_parameter(program: Program, block: str, node: fx.Node) -> bool:
    return program.state[program.state_name(block, node)].kind == "parameter"


def _products(program: Program) -> Iterator[tuple[fx.Node, frozenset[Axis]]]:
    """Every product, with the axes of its weights: operands made of parameters alone."""
    weights: set[fx.Node] = set()
    for name, graph in program.graphs():
        for node in graph.nodes:
            if node.op == "get_attr":
                if _is_parameter(program, name, node):
                    weights.add(node)
            elif node.op == "call_function" and is_tensor(node):
                operands = tensor_arguments(node)
                if is_contraction(node.target):
                    mine = {a for n in operands if n in weights for a in axes_in(_dims(n))}
                    yield node, frozenset(mine)
                elif operands and all(n in weights for n in operands):
                    weights.add(node)


def find_candidates(program: Program, ranks: int, *, sp: bool) -> Candidates:
    """Sort the program's axes by role.

    Weight axes are those of parameters in products. The residual stream crosses blocks; those of
    its axes that are weight axes (its hidden axis) and those of floating inputs are never cut,
    the others are tokens, like all other axes of the inputs. Everything else is a feature.
    """
    products = list(_products(program))
    weights = frozenset(a for _, axes in products for a in axes)
    mixed: set[Axis] = set()
    for node, _ in products:
        op = info(node).axes
        assert op is not None
        mixed |= op.whole | op.contracted
    residual = _residual(program)
    stream = {a for node in residual for a in axes_in(_dims(node))}
    inputs = placeholders(program.graph)
    given = {a for node in inputs for a in axes_in(_dims(node))}
    floating = {
        a for n in inputs if tensor_spec(n).dtype.is_floating_point for a in axes_in(_dims(n))
    }
    tokens = (stream | given) - weights
    hidden = (stream | floating) & weights
    stuck = {a for n in program.call_nodes() for a in _whole(n)}
    everything = {a for _, graph in program.graphs() for a in _all_axes(graph)}
    free = {a for a in everything - hidden - stuck if a.size >= ranks}
    # Equal parts of a batch rather than unequal ones of a sequence.
    even = {a for a in tokens & free if a.size % ranks == 0}
    along = {
        n: (_token_axis(n, even, mixed) or _token_axis(n, tokens & free, mixed)) if sp else None
        for n in residual
    }
    usable = (
        set(along.values()) - {None}
        if along
        else set(_preferred(inputs, even, mixed) or _preferred(inputs, tokens & free, mixed))
    )
    return Candidates(
        features=frozenset(free - tokens),
        tokens=frozenset(a for a in usable if a is not None) if sp else frozenset(),
        parameters=frozenset(_parameter_axes(program)),
        weights=weights,
        residual=along,
        most=max((a.size for a in everything - hidden - tokens - stuck), default=1),
    )


def _whole(node: fx.Node) -> frozenset[Axis]:
    axes = info(node).axes
    return axes.whole if axes else frozenset()


def _all_axes(graph: fx.Graph) -> Iterator[Axis]:
    for node in graph.nodes:
        dims = info(node).dims
        if dims is not None:
            several = isinstance(info(node).spec, tuple)
            for each in dims if several else (dims,):
                yield from axes_in(each or ())  # type: ignore[arg-type]


def _token_axis(node: fx.Node, free: set[Axis], mixed: set[Axis]) -> Axis | None:
    """The axis of the residual stream to cut: one that products mix (a sequence), else another
    token axis (a batch)."""
    axes = [dim[0] for dim in _dims(node) if len(dim) == 1 and isinstance(dim[0], Axis)]
    axes += [f.axis for dim in _dims(node) for f in dim if not isinstance(f, Axis)]
    own = [a for a in axes if a in free and list(axes_in(_dims(node))).count(a) == 1]
    return next((a for a in own if a in mixed), own[-1] if own else None)


def _preferred(inputs: list[fx.Node], free: set[Axis], mixed: set[Axis]) -> set[Axis]:
    """Without blocks: sequences, or else each input's last token axis."""
    own = [[a for a in axes_in(_dims(n)) if a in free] for n in inputs]
    sequences = {a for axes in own for a in axes if a in mixed}
    return sequences or {axes[-1] for axes in own if axes}
