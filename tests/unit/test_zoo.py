"""Real models, rewritten and simulated: outputs and all gradients equal the original's."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from graphpar.ops import is_conversion
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, is_tensor, one_type, tensor_spec
from graphpar.testing import Equivalence, compare
from graphpar.trace import trace
from graphpar.types import I, Shard
from tests import zoo
from tests.zoo.precise import float64_inside

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")

SHARDED_SHARE = {"lstm": 0.0}


@functools.cache
def traced(name: str) -> tuple[nn.Module, dict[str, Any], Program]:
    model, kwargs = zoo.build_double(name)
    with float64_inside():
        return model, kwargs, trace(model, (), kwargs)


@functools.cache
def rewritten(name: str, tp: int, sp: bool) -> Program:
    stages = run_pipeline(traced(name)[2], default_pipeline(tp=tp, sp=sp, rng="exact"))
    return stages["localize"]


def equivalent(name: str, tp: int, sp: bool) -> Equivalence:
    model, kwargs, _ = traced(name)
    program = rewritten(name, tp, sp)
    with float64_inside():
        return compare(program, model, (), kwargs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", sorted(zoo.BUILDERS))
def test_rewritten_model_is_the_original(name: str, tp: int, sp: bool) -> None:
    found = equivalent(name, tp, sp)
    parameters = [s for s in found.program.state.values() if s.kind == "parameter"]
    weights = [s for s in parameters if len(s.spec.shape) > 1]
    sharded = sum(str(s.type).startswith("Shard") for s in weights)
    assert found.compared > len(parameters)
    assert sharded >= SHARDED_SHARE.get(name, 0.6) * len(weights)


def collectives(program: Program, block: str) -> Counter[tuple[str, bool]]:
    """How often each conversion op stands in a block, apart for activations and state."""
    return Counter(
        (str(node.target._schema.name).split("::")[1], node.args[0].op == "get_attr")
        for node in program.blocks[block].nodes
        if is_conversion(node.target)
    )


LAYER = {"gpt2": "transformer_h", "llama": "model_layers", "bert": "bert_encoder_layer"}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", sorted(LAYER))
def test_tensor_parallel_layer_is_the_papers(name: str, tp: int) -> None:
    """Korthikanti et al. 2022, figure 4: f and f̄ twice in a layer, nothing else."""
    found = collectives(rewritten(name, tp, False), LAYER[name])
    assert found["all_reduce", False] == 2
    assert found["convert", False] == 2
    assert {op for op, is_state in found if not is_state} == {"all_reduce", "convert"}
    assert {op for op, is_state in found if is_state} <= {"convert"}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", sorted(LAYER))
def test_sequence_parallel_layer_is_the_papers(name: str, tp: int) -> None:
    """Korthikanti et al. 2022, figure 5: g and ḡ twice in a layer; norm weights and row-parallel
    biases get their gradients summed."""
    found = collectives(rewritten(name, tp, True), LAYER[name])
    assert found["all_gather", False] == 2
    assert found["reduce_scatter", False] == 2
    assert {op for op, is_state in found if not is_state} == {"all_gather", "reduce_scatter"}
    assert {op for op, is_state in found if is_state} == {"convert"}


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "table"), [("gpt2", "transformer.wte"), ("llama", "lm_head")])
def test_the_loss_takes_logits_as_the_head_leaves_them(
    name: str, table: str, tp: int, sp: bool
) -> None:
    """They are gathered once, for the caller."""
    program = rewritten(name, tp, sp)
    assert program.state[f"{table}.weight"].type == Shard(0, (zoo.VOCAB,))
    assert torch.ops.graphpar.cross_entropy.default in {n.target for n in program.graph.nodes}
    logits = (zoo.BATCH, zoo.SEQ, zoo.VOCAB)
    whole = [n for n in program.graph.nodes if is_tensor(n) and one_type(n) == I]
    (gathered,) = (n for n in whole if tensor_spec(n).shape == logits)
    assert [user.op for user in gathered.users] == ["output"]


def test_packed_projection_is_cut_by_heads() -> None:
    state = rewritten("gpt2", 2, True).state["transformer.h.0.attn.c_attn.weight"]
    width = zoo.WIDTH
    assert str(state.type).startswith("Shard(1")
    assert state.type.blocks == (width, width, width)  # type: ignore[union-attr]


@pytest.mark.parametrize("sp", [False, True])
def test_experts_are_cut_along_their_inner_width(sp: bool) -> None:
    """Their weights are looked up by a router: they stay in place, and one reduction follows."""
    program = rewritten("mixtral", 2, sp)
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        kind = program.state[f"model.layers.0.mlp.experts.{name}"].type
        assert isinstance(kind, Shard)
        assert kind.dim == dim
    read = [n for n in program.blocks["model_layers"].nodes if "experts" in str(n.target)]
    assert read
    assert not any(is_conversion(user.target) for node in read for user in node.users)


def test_tp_1_is_the_traced_graph() -> None:
    model, kwargs, program = traced("gpt2")
    stages = run_pipeline(program, default_pipeline(tp=1, rng="exact"))
    last = list(stages.values())[-1]
    assert not any(is_conversion(n.target) for _, graph in last.graphs() for n in graph.nodes)
    ops = Counter(n.target for n in program.graph.nodes if n.op == "call_function")
    flat: Counter[Any] = Counter()
    for block, graph in last.graphs():
        for node in graph.nodes:
            if node.op == "call_function" and "getitem" not in str(node.target):
                flat[node.target] += last.call_count(block)
    assert flat == Counter({op: n for op, n in ops.items() if "getitem" not in str(op)})
    with float64_inside():
        assert compare(last, model, (), kwargs, atol=0.0, rtol=0.0).worst == 0.0


def test_a_model_on_the_meta_device_is_planned() -> None:
    """Its masks and position ids are constants with values, on the CPU."""
    model, kwargs = zoo.build("llama")
    ids = torch.zeros(2, zoo.SEQ, dtype=torch.long, device="meta")
    call = {**kwargs, "input_ids": ids, "labels": ids}
    stages = run_pipeline(trace(model.to("meta"), (), call), default_pipeline(tp=2, sp=True))
    found = collectives(stages["localize"], "model_layers")
    assert found["all_gather", False] == found["reduce_scatter", False] == 2
