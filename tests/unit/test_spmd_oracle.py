"""An independent oracle: rewritten programs pass the checker of the ``spmd_types`` package.

One rank's program runs on a fake process group under their checker, each conversion replaced by
that of ``spmd_types``; every value must get the type that ours has. In their local mode Varying
stands for every Shard. In their global mode the sharded dimension is derived too, and what a sum
over it leaves Partial, from the sharding rules of DTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import spmd_types
import torch
from spmd_types._checker import _OP_REGISTRY, typecheck
from spmd_types._testing import fake_pg
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from graphpar.errors import VerifyError
from graphpar.ops import is_conversion, signature
from graphpar.ops.sharded import SHARDED, Place
from graphpar.passes.rules import FORMS, is_form, whole_op
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import (
    Program,
    TensorSpec,
    info,
    is_getitem,
    output_node,
    placeholders,
    tensor_spec,
)
from graphpar.trace import bind, trace
from graphpar.types import I, P, R, Shard, Type, cut, letter, local_shape, split_layout
from graphpar.unfuse import unfused
from graphpar.verify import verify
from tests import zoo
from tests.unit import mutations
from tests.unit.mutations import Mutant

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpar.errors.GraphparWarning"),
    # spmd_types 0.3.1 calls names that torch 2.13 renamed.
    pytest.mark.filterwarnings("ignore:.*_functional_collectives.*:FutureWarning"),
    # Its global mode asks DTensor how dropout is sharded.
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),
]

aten = torch.ops.aten
spmd: Any = spmd_types  # it exports its names, but not for type checkers
TP = "tp"

# Their local mode leaves a product or a sum over shards Varying, for the program to say that it is
# Partial.
CONTRACTIONS = {
    aten.linear.default,
    aten.mm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.sum.dim_IntList,
}

# What their global mode does not know; these ops are checked as in the local mode.
LOCAL_ONLY = {
    aten.reshape.default: "splits a sharded dimension: they see its local size only",
    aten.unflatten.int: "splits a packed dimension: to them it has one block",
    aten.split.Tensor: "splits a packed dimension: to them it has one block",
    aten.chunk.default: "splits a packed dimension: to them it has one block",
    aten.scaled_dot_product_attention.default: "queries and keys of different lengths",
    aten.conv1d.default: "DTensor drops the sharding of output channels",
}


def kind_of(node: fx.Node) -> Any:
    return info(node).type


def theirs(kind: Type) -> Any:
    """``S(dim)`` is Varying in their local mode, and remembers the dimension in the global."""
    return spmd.S(kind.dim) if isinstance(kind, Shard) else {I: spmd.I, R: spmd.R, P: spmd.P}[kind]


class Checked:
    """One rank's program under their checker."""

    def __init__(self, program: Program) -> None:
        self.program = program = unfused(program)
        self.state = {name: self._state(name) for name in program.state}
        self.inputs = [self._made(tensor_spec(n), kind_of(n)) for n in placeholders(program.graph)]
        self.compared = 0

    def _state(self, name: str) -> Tensor:
        known, ranks = self.program.state[name], self.program.ranks
        if known.kind != "constant":
            return self._made(known.spec, known.type)
        whole, kind = self.program.constants[name], known.type
        return (cut(whole, kind, 0, ranks) if isinstance(kind, Shard) else whole).detach().clone()

    def _made(self, spec: TensorSpec, kind: Type) -> Tensor:
        shape = local_shape(spec.shape, kind, 0, self.program.ranks)
        value = torch.full(shape, 0.5 if spec.dtype.is_floating_point else 1, dtype=spec.dtype)
        return value.requires_grad_(spec.differentiable)

    def run(self) -> list[Any]:
        """The root's outputs; parameters and inputs are asserted to have their types."""
        for name, value in self.state.items():
            spmd.assert_type(value, {TP: theirs(self.program.state[name].type)})
        for node, value in zip(placeholders(self.program.graph), self.inputs, strict=True):
            spmd.assert_type(value, {TP: theirs(kind_of(node))})
        return self._graph(self.program.graph, self.inputs, "")

    def _graph(self, graph: fx.Graph, inputs: list[Any], prefix: str) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(placeholders(graph), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "get_attr":
                env[node] = self.state[self.program.canonical(f"{prefix}{node.target}")]
            elif node.op == "call_module":
                block = self.program.blocks[self.program.calls[str(node.target)]]
                env[node] = self._graph(block, [env[a] for a in node.args], f"{node.target}.")
            elif node.op == "call_function":
                env[node] = self._op(node, env)
            if isinstance(info(node).spec, TensorSpec):
                self._compare(node, env[node])
                self.compared += 1
        values: Any = output_node(graph).args[0]
        return [env[v] if isinstance(v, fx.Node) else v for v in values]

    def _compare(self, node: fx.Node, value: Tensor) -> None:
        """Their type is ours; a new constant is what we say, as it is the same on every rank."""
        kind = kind_of(node)
        spmd.assert_type(value, {TP: theirs(kind)})
        assert tuple(value.shape) == local_shape(
            tensor_spec(node).shape, kind, 0, self.program.ranks
        )

    def _op(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        call: Any = (node.args, node.kwargs)
        args, kwargs = fx.node.map_arg(call, env.__getitem__)
        if is_getitem(node):
            return args[0][args[1]]
        if is_conversion(node.target):
            return _converted(args[0], *signature(node.target, args[1:]))  # type: ignore[arg-type]
        if node.target is torch.ops.graphpar.dropout.default:
            return aten.dropout.default(*args[:3])
        if is_form(node.target):
            with typecheck(local=True):
                value = self._form(FORMS[whole_op(node.target)], args)
                if kind_of(node) == P:
                    value = spmd.reinterpret(value, TP, src=spmd.V, dst=spmd.P)
            return value
        run = functools.partial(registered(node.target), *args, **kwargs)
        try:
            value = run()
            if node.target in LOCAL_ONLY and isinstance(value, Tensor):
                self._compare(node, value)
        except (spmd.SpmdTypeError, AssertionError):
            if node.target not in LOCAL_ONLY:
                raise
            with typecheck(local=True):
                value = run()
        kinds = [kind_of(n) for n in node.all_input_nodes]
        if kind_of(node) == P and node.target in CONTRACTIONS and _type(value) is spmd.V:
            value = spmd.reinterpret(value, TP, src=spmd.V, dst=spmd.P)
        if node.target is aten.expand.default and kinds == [R] != [kind_of(node)]:
            # A new axis made in parts: each rank's copies are its own.
            value = spmd.reinterpret(value, TP, src=spmd.R, dst=spmd.V, expert_mode=True)
        return value

    def _form(self, name: str, args: Any) -> Tensor:
        """What a rank computes, with their sums in between; a maximum stands as a sum."""
        rest, layout, _ = split_layout(args)
        steps, given = SHARDED[name](Place(layout, 0, self.program.ranks), *rest), None
        while True:
            try:
                x, kind = steps.send(given)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            addend = spmd.reinterpret(x, TP, src=spmd.V, dst=spmd.P)
            target = spmd.R if kind == "max" else theirs(kind)
            given = spmd.all_reduce(addend, TP, src=spmd.P, dst=target)


def _type(value: Tensor) -> Any:
    return spmd.maybe_get_axis_local_type(value, TP)


def _converted(value: Tensor, source: Type, target: Type) -> Tensor:
    """Blocks are the order of elements, which no type of theirs sees: one stands for all."""
    value, types = value.contiguous(), {"src": theirs(source), "dst": theirs(target)}
    if isinstance(source, Shard) and isinstance(target, Shard):
        return spmd.all_to_all(value, TP, **types)  # type: ignore[no-any-return]
    if isinstance(source, Shard) and target != P:
        return spmd.all_gather(value, TP, **types)  # type: ignore[no-any-return]
    if source == P and isinstance(target, Shard):
        return spmd.reduce_scatter(value, TP, **types)  # type: ignore[no-any-return]
    if source == P:
        return spmd.all_reduce(value, TP, **types)  # type: ignore[no-any-return]
    return spmd.convert(value, TP, **types, expert_mode=target == P)  # type: ignore[no-any-return]


def registered(target: Any) -> Callable[..., Any]:
    """The public function for the op, where their table of linear ops has it; else the op."""
    name = target._schema.name.removeprefix("aten::")
    for owner in (torch, torch.Tensor):
        function = getattr(owner, name, None)
        if function in _OP_REGISTRY:
            return function  # type: ignore[no-any-return]
    return target  # type: ignore[no-any-return]


def check(program: Program, *, local: bool) -> int:
    """Run the program under their checker, backward too; how many values have been compared."""
    checked = Checked(program)
    with fake_pg(program.ranks):
        mesh = init_device_mesh("cpu", (program.ranks,), mesh_dim_names=(TP,))
        with spmd.set_current_mesh(mesh), typecheck(local=local):
            outputs = [v for v in checked.run() if isinstance(v, Tensor) and v.requires_grad]
            for value in outputs:
                spmd.assert_type(value, {TP: spmd.I})
            # They refuse a loss whose gradient would be counted once per rank.
            outputs[0].sum().backward()
    for name, value in checked.state.items():
        assert value.grad is None or value.grad.shape == value.shape, name
    return checked.compared


@functools.cache
def traced(model: str) -> Program:
    module, kwargs = zoo.build(model)
    return trace(module, *bind(module, (), kwargs))


def rewritten(model: str, ranks: int, sp: bool, *, overlap: bool = True) -> Program:
    pipeline = default_pipeline(tp=ranks, sp=sp, rng="exact", overlap=overlap)
    return list(run_pipeline(traced(model), pipeline).values())[-1]


# The LSTM has no rule: all of it runs whole. Tracing is what takes the time.
MODELS = [name for name in zoo.BUILDERS if name != "lstm"]
CASES = [(name, 2) for name in MODELS] + [
    pytest.param(name, 4, marks=pytest.mark.long) for name in ("gpt2", "llama", "bert", "t5")
]


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("model", "ranks"), CASES)
def test_types_are_those_of_spmd_types(model: str, ranks: int, sp: bool) -> None:
    program = rewritten(model, ranks, sp)
    nodes = sum(isinstance(info(n).spec, TensorSpec) for n in program.graph.nodes)
    for local in (True, False):
        assert check(program, local=local) >= nodes


# --- the oracle sees what the verifier sees -----------------------------------------------------

# Another conversion of the same tensor, by the letters of the right one.
WRONG: dict[str, Callable[[Any, Any], tuple[Type, Type]]] = {
    "IR": lambda a, b: (P, R),
    "PI": lambda a, b: (P, R),
    "PS": lambda a, b: (R, b),
    "SR": lambda a, b: (a, I),
    "SI": lambda a, b: (a, R),
    "IS": lambda a, b: (R, b),
    "RS": lambda a, b: (I, b),
}


def mutants(program: Program) -> Iterator[Mutant]:
    """Conversions of differentiable values removed, or turned into others: without a gradient
    their checker takes Invariant for Replicate."""
    for place in mutations.conversions(program):
        node = mutations.find(program, place)
        if not tensor_spec(node).differentiable:
            continue
        yield Mutant("removed", str(place), mutations.changed(program, place, mutations.removed))
        source, target = mutations.types_of(node)
        pair = WRONG[letter(source) + letter(target)](source, target)
        yield mutations.mistyped(program, place, *pair)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_the_oracle_refuses_mutants(sp: bool) -> None:
    program = rewritten("gpt2", 2, sp, overlap=False)
    count = 0
    for mutant in mutants(program):
        with pytest.raises(VerifyError):
            verify(mutant.program)
        with pytest.raises((spmd.SpmdTypeError, RuntimeError, AssertionError)):
            check(mutant.program, local=False)
        count += 1
    assert count == (30 if sp else 14)
