"""Small models from public bug reports of other projects (C01 … C22), on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from graphpar import GraphparWarning
from graphpar.ops import is_conversion
from graphpar.program import info, is_getitem, is_tensor, tensor_spec
from graphpar.simulate import Simulation
from graphpar.trace import trace
from graphpar.types import I, Shard, cut, local_shape
from tests.unit.case_models import (
    MIDDLES,
    Attention,
    Between,
    ComplexRotary,
    Lora,
    NormedQuery,
    PackedAttention,
    Parallel,
    RelativeBias,
    SecondBias,
    SwiGLU,
    Thrice,
    Traffic,
    Triangular,
    TwoPlaces,
    equivalent,
    freeze,
    mlp,
    sharded_state,
    two_blocks,
)

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)

both_sp = pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


# --- partitioning ---


@both_sp
@pytest.mark.parametrize(("length", "tp"), [(6, 4), (8, 4), (1, 2), (5, 8)])
def test_c01_view_with_minus_one_on_the_sequence(length: int, tp: int, sp: bool) -> None:
    program = equivalent(Attention(), torch.randn(2, length, 32, requires_grad=True), tp=tp, sp=sp)
    views = [
        (n.args[1], local_shape(tensor_spec(n).shape, info(n).type, 0, tp))  # type: ignore[arg-type]
        for n in program.graph.nodes
        if n.target in VIEWS and tensor_spec(n).shape == (2, length, 8, 4)
    ]
    assert len(views) == 3
    assert all(local == (2, length, 8 // tp, 4) for _, local in views)
    assert all(list(size)[2:] == [8 // tp, 4] for size, _ in views)
    assert set(sharded_state(program)) >= {"q.weight", "k.weight", "v.weight", "o.weight"}


@both_sp
@pytest.mark.parametrize("tp", [2, 4])
def test_c02_packed_qkv(tp: int, sp: bool) -> None:
    model = PackedAttention(16, (16, 16, 16), 4)
    program = equivalent(model, torch.randn(2, 8, 16, requires_grad=True), tp=tp, sp=sp)
    kind = program.state["qkv.weight"].type
    assert kind == Shard(0, (16, 16, 16))
    assert program.state["qkv.bias"].type == Shard(0, (16, 16, 16))
    weight, part = model.qkv.weight.detach(), 16 // tp
    for rank in range(tp):
        rows = torch.cat([w[rank * part : (rank + 1) * part] for w in weight.split(16)])
        assert torch.equal(cut(weight, kind, rank, tp), rows)


@both_sp
def test_c03_packed_qkv_with_grouped_queries(sp: bool) -> None:
    model = PackedAttention(32, (32, 8, 8), 4)
    equivalent(model, torch.randn(2, 8, 32, requires_grad=True), tp=2, sp=sp)


@both_sp
def test_c04_packed_swiglu(sp: bool) -> None:
    program = equivalent(SwiGLU(8, 8), torch.randn(2, 4, 8, requires_grad=True), tp=2, sp=sp)
    assert program.state["w13.weight"].type == Shard(0, (8, 8))


@both_sp
@pytest.mark.filterwarnings("ignore:nothing was sharded:graphpar.GraphparWarning")
def test_c04_packed_swiglu_of_an_odd_width(sp: bool) -> None:
    equivalent(SwiGLU(8, 3), torch.randn(2, 4, 8, requires_grad=True), tp=2, sp=sp)


@both_sp
@pytest.mark.parametrize("group", ["repeat", "expand"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_c05_fewer_kv_heads_than_ranks(group: str, tp: int, sp: bool) -> None:
    model = Attention(32, 8, 2, group)
    equivalent(model, torch.randn(2, 8, 32, requires_grad=True), tp=tp, sp=sp)


@pytest.mark.filterwarnings("ignore:.*needs the axis")
@both_sp
def test_c06_norm_over_a_sharded_projection(sp: bool) -> None:
    equivalent(NormedQuery(), torch.randn(2, 8, 32, requires_grad=True), tp=4, sp=sp)


@both_sp
def test_c07_one_reduction_for_parallel_attention_and_mlp(sp: bool) -> None:
    model, x = Parallel(), torch.randn(2, 8, 32, requires_grad=True)
    traffic = Traffic(equivalent(model, x, tp=4, sp=sp), model, x)
    reductions = traffic.forward["all_reduce"] + traffic.forward["reduce_scatter"]
    assert reductions == 1
    if not sp:
        assert traffic.forward == {"all_reduce": 1}


@both_sp
@pytest.mark.parametrize("middle", ["cumsum", "softmax", "topk"])
def test_c08_an_op_that_needs_the_whole_axis(middle: str, sp: bool) -> None:
    model = Between(middle)
    with pytest.warns(GraphparWarning, match=f"{middle}.* needs the axis") as caught:
        equivalent(model, torch.randn(2, 8, 8, requires_grad=True), tp=2, sp=sp)
    line = MIDDLES[middle].__code__.co_firstlineno
    assert f'case_models.py:{line}: "{middle}": lambda' in str(caught[0].message)


@both_sp
def test_c08_an_op_without_a_rule_is_warned_about(sp: bool) -> None:
    model = Triangular()
    with pytest.warns(GraphparWarning, match="linalg_qr") as caught:
        equivalent(model, torch.randn(2, 8, 8, requires_grad=True), tp=2, sp=sp)
    line = Triangular.forward.__code__.co_firstlineno + 2
    assert f"case_models.py:{line}: return self.down(torch.linalg.qr" in str(caught[0].message)


@both_sp
def test_c09_one_pair_has_one_collective_each_way(sp: bool) -> None:
    model, x = mlp(16, 32), torch.randn(2, 8, 16, requires_grad=True)
    program = equivalent(model, x, tp=4, sp=sp)
    assert Traffic(program, model, x).counts == (1, 1)


@both_sp
@pytest.mark.parametrize("build", [Parallel, lambda: mlp(32, 64), Attention])
def test_c09_recorded_local_shapes_are_the_real_ones(
    build: Callable[[], nn.Module], sp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build(), torch.randn(2, 8, 32, requires_grad=True)
    program = equivalent(model, x, tp=4, sp=sp)
    run_op, checked = Simulation._op, 0

    def recorded(self: Simulation, node: Any, env: Any) -> list[Any]:
        nonlocal checked
        results = run_op(self, node, env)
        if is_tensor(node):
            kind: Any = info(node).type
            for value in results:
                assert tuple(value.shape) == local_shape(tensor_spec(node).shape, kind, 0, 4), node
                checked += 1
        return results

    monkeypatch.setattr(Simulation, "_op", recorded)
    Traffic(program, model, x)
    assert checked > 8


@both_sp
def test_c10_one_rank_is_the_identity(sp: bool) -> None:
    model, x = Parallel(), torch.randn(2, 8, 32, requires_grad=True)
    program = equivalent(model, x, tp=1, sp=sp)
    traced = trace(model, (), {"x": x})

    def ops(graph: Any) -> list[tuple[Any, ...]]:
        return [(n.op, n.target, len(n.all_input_nodes)) for n in graph.nodes]

    assert ops(program.graph) == ops(traced.graph)
    assert all(s.type == I for s in program.state.values())
    calls = [n for n in program.graph.nodes if n.op == "call_function" and not is_getitem(n)]
    assert not any(is_conversion(n.target) for n in calls)


@both_sp
def test_c11_relative_position_bias(sp: bool) -> None:
    model = RelativeBias()
    equivalent(model, torch.randn(2, 8, 16, requires_grad=True), tp=2, sp=sp)


@both_sp
def test_c12_complex_rotary_embedding(sp: bool) -> None:
    equivalent(ComplexRotary(), torch.randn(2, 6, 16, requires_grad=True), tp=2, sp=sp)


@both_sp
def test_c13_one_layer_used_three_times(sp: bool) -> None:
    program = equivalent(Thrice(), torch.randn(2, 8, 16, requires_grad=True), tp=4, sp=sp)
    assert {"layer.0.weight", "layer.2.weight"} <= set(sharded_state(program))


@pytest.mark.filterwarnings("ignore:.*needs the axis")
@both_sp
def test_c13_one_linear_in_a_sharded_and_a_replicated_place(sp: bool) -> None:
    equivalent(TwoPlaces(), torch.randn(2, 8, 16, requires_grad=True), tp=4, sp=sp)


# --- gradients ---


@both_sp
def test_c20_norm_gradients_are_bit_equal_on_all_ranks(sp: bool) -> None:
    model, x = two_blocks(), torch.randn(2, 8, 16, requires_grad=True)
    program = equivalent(model, x, tp=4, sp=sp)
    simulation = Traffic(program, model, x).simulation
    for name, state in program.state.items():
        if state.kind == "parameter" and state.type == I:
            first, *others = simulation.rank_gradients(name)
            assert first is not None
            assert all(g is not None and torch.equal(g, first) for g in others), name
    norms = [n for n in program.state if "norm" in n or n.startswith("2.")]
    assert len(norms) == 10
    assert all(program.state[n].type == I for n in norms)


@both_sp
@pytest.mark.parametrize("form", ["module", "function", "product"])
def test_c21_row_parallel_bias(form: str, sp: bool) -> None:
    model, x = SecondBias(form), torch.randn(2, 8, 8, requires_grad=True)
    program = equivalent(model, x, tp=4, sp=sp)
    assert program.state["down.weight"].type == Shard(1, (16,))
    assert program.state["down.bias"].type == I
    assert Traffic(program, model, x).counts == (1, 1)


NORMS = r"norm|^2\."

FROZEN = [r"\.q\.", r"\.k\.", r"\.v\.", r"\.[qkv]\.", NORMS, r"\.mlp\.", r"bias", r"^0\."]


@both_sp
@pytest.mark.parametrize("pattern", FROZEN)
def test_c22_frozen_parts(pattern: str, sp: bool) -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    model = freeze(two_blocks(), pattern)
    program = equivalent(model, x, tp=4, sp=sp)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    simulation = Traffic(program, model, x).simulation
    assert frozen
    assert all(g is None for n in frozen for g in simulation.rank_gradients(n))


@both_sp
def test_c22_frozen_norms_cost_no_collective(sp: bool) -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    model = freeze(two_blocks(), NORMS)
    traffic = Traffic(equivalent(model, x, tp=4, sp=sp), model, x)
    learning = two_blocks()
    learnt = Traffic(equivalent(learning, x, tp=4, sp=sp), learning, x)
    assert traffic.forward == learnt.forward
    saved = learnt.shapes.count((16,)) - traffic.shapes.count((16,))
    assert saved == learnt.backward.total() - traffic.backward.total() == (10 if sp else 0)


@both_sp
def test_c22_no_backward_collective_without_a_gradient(sp: bool) -> None:
    x = torch.randn(2, 8, 16)
    model = two_blocks().requires_grad_(False)
    assert Traffic(equivalent(model, x, tp=4, sp=sp), model, x).counts[1] == 0
    pair = mlp(16, 32)
    program = equivalent(pair, x, tp=4, sp=sp)
    assert Traffic(program, pair, x).counts == (1, 0)


@both_sp
@pytest.mark.parametrize("given", [False, True])
def test_c22_low_rank_pairs(given: bool, sp: bool) -> None:
    model, x = Lora(), torch.randn(2, 8, 16, requires_grad=given)
    program = equivalent(model, x, tp=4, sp=sp)
    grads = Traffic(program, model, x).simulation.rank_gradients("up.weight")
    assert all(g is None for g in grads)
