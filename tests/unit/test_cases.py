"""Small models from public bug reports of other projects (C01 … C22), on simulated ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar import GraphparWarning
from graphpar.interpret import model_state
from graphpar.ops import is_conversion, reference
from graphpar.program import Program, info, is_getitem, is_tensor, tensor_spec
from graphpar.simulate import Simulation
from graphpar.testing import assert_equivalent
from graphpar.trace import trace
from graphpar.types import CONVERSIONS, I, Shard, Type, cut, letter, local_shape

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
both_sp = pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def equivalent(model: nn.Module, *args: Tensor, tp: int, sp: bool) -> Program:
    """The rewritten program, proven equal to the model."""
    found = assert_equivalent(model, args, tp=tp, sp=sp, atol=1e-10, rtol=1e-10)
    return found.program


def sharded_state(program: Program) -> dict[str, Shard]:
    return {n: s.type for n, s in program.state.items() if isinstance(s.type, Shard)}


class Traffic:
    """The collectives that a run makes, by kind, and the whole shapes they carry."""

    def __init__(self, program: Program, model: nn.Module, *args: Tensor) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.shapes: list[tuple[int, ...]] = []
        counts = self.forward
        convert = reference._convert

        def counted(parts: Any, source: Type, target: Type) -> list[Tensor]:
            results = convert(parts, source, target)
            kind = CONVERSIONS[letter(source), letter(target)][0]
            if kind:
                counts[kind] += 1
                self.shapes.append(max(tuple(p.shape) for p in (*parts, *results)))
            return results

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_convert", counted)
            self.simulation = Simulation(program, model_state(model))
            leaves = [
                [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
                for _ in range(program.ranks)
            ]
            results = self.simulation.run(leaves)
            counts = self.backward
            self.shapes = []
            roots = [y for rank in results for y in rank if y.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])

    @property
    def counts(self) -> tuple[int, int]:
        return self.forward.total(), self.backward.total()


# --- partitioning -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Separate projections; ``split`` and ``group`` make heads and repeat those of k and v."""

    def __init__(
        self, width: int = 32, heads: int = 8, kv_heads: int | None = None, group: str = "repeat"
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads or heads, width // heads
        self.group = group
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k = nn.Linear(width, self.kv_heads * self.d)
        self.v = nn.Linear(width, self.kv_heads * self.d)

    def repeat(self, x: Tensor) -> Tensor:
        times = self.heads // self.kv_heads
        if times == 1:
            return x
        if self.group == "repeat":
            return x.repeat_interleave(times, 1)
        b, g, s, d = x.shape
        return x[:, :, None].expand(b, g, times, s, d).reshape(b, g * times, s, d)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        q = self.q(x).view(b, -1, self.heads, self.d).transpose(1, 2)
        k = self.k(x).view(b, -1, self.kv_heads, self.d).transpose(1, 2)
        v = self.v(x).view(b, -1, self.kv_heads, self.d).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, -1, self.heads * self.d))  # type: ignore[no-any-return]


@both_sp
@pytest.mark.parametrize(("length", "tp"), [(6, 4), (8, 4), (1, 2), (5, 8)])
def test_c01_view_with_minus_one_on_the_sequence(length: int, tp: int, sp: bool) -> None:
    program = equivalent(
        Attention(), torch.randn(2, length, 32, requires_grad=True), tp=tp, sp=sp
    )
    views = [
        (n.args[1], local_shape(tensor_spec(n).shape, info(n).type, tp))  # type: ignore[arg-type]
        for n in program.graph.nodes
        if n.target in VIEWS and tensor_spec(n).shape == (2, length, 8, 4)
    ]
    assert len(views) == 3
    assert all(local == (2, length, 8 // tp, 4) for _, local in views)
    assert all(list(size)[2:] == [8 // tp, 4] for size, _ in views)
    assert set(sharded_state(program)) >= {"q.weight", "k.weight", "v.weight", "o.weight"}


class PackedAttention(nn.Module):
    def __init__(self, width: int, sizes: tuple[int, int, int], d: int) -> None:
        super().__init__()
        self.sizes, self.d = sizes, d
        self.qkv, self.o = nn.Linear(width, sum(sizes)), nn.Linear(sizes[0], width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(x)
        if len(set(self.sizes)) == 1:
            q, k, v = packed.split(self.sizes[0], dim=2)
        else:
            q, k, v = packed.split(list(self.sizes), -1)
        q, k, v = (t.view(b, s, -1, self.d).transpose(1, 2) for t in (q, k, v))
        times = q.shape[1] // k.shape[1]
        if times > 1:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


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
        assert torch.equal(cut(weight, kind, rank, tp), rows)  # type: ignore[arg-type]


@both_sp
def test_c03_packed_qkv_with_grouped_queries(sp: bool) -> None:
    model = PackedAttention(32, (32, 8, 8), 4)
    equivalent(model, torch.randn(2, 8, 32, requires_grad=True), tp=2, sp=sp)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(g) * u)  # type: ignore[no-any-return]


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


class NormedQuery(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.norm.weight.data.normal_()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.norm(self.q(x)).view(b, s, 8, 4).transpose(1, 2)
        k = self.k(x).view(b, s, 8, 4).transpose(1, 2)
        v = self.v(x).view(b, s, 8, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, 32))  # type: ignore[no-any-return]


@both_sp
def test_c06_norm_over_a_sharded_projection(sp: bool) -> None:
    equivalent(NormedQuery(), torch.randn(2, 8, 32, requires_grad=True), tp=4, sp=sp)


def mlp(width: int, inner: int, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), activation(), nn.Linear(inner, width))


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(32), Attention(), mlp(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x)) + self.mlp(self.norm(x))  # type: ignore[no-any-return]


@both_sp
def test_c07_one_reduction_for_parallel_attention_and_mlp(sp: bool) -> None:
    model, x = Parallel(), torch.randn(2, 8, 32, requires_grad=True)
    traffic = Traffic(equivalent(model, x, tp=4, sp=sp), model, x)
    reductions = traffic.forward["all_reduce"] + traffic.forward["reduce_scatter"]
    assert reductions == 1
    if not sp:
        assert traffic.forward == {"all_reduce": 1}


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda h: torch.cumsum(h, -1),
    "softmax": lambda h: torch.softmax(h, -1),
    "topk": lambda h: torch.topk(h, 2).values,
}


class Between(nn.Module):
    def __init__(self, middle: str) -> None:
        super().__init__()
        self.middle = MIDDLES[middle]
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(2 if middle == "topk" else 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))  # type: ignore[no-any-return]


class Triangular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.linalg.qr(h).R)  # type: ignore[no-any-return]


@both_sp
@pytest.mark.parametrize("middle", ["cumsum", "softmax", "topk"])
def test_c08_an_op_that_needs_the_whole_axis(middle: str, sp: bool) -> None:
    model = Between(middle)
    equivalent(model, torch.randn(2, 8, 8, requires_grad=True), tp=2, sp=sp)


@both_sp
def test_c08_an_op_without_a_rule_is_warned_about(sp: bool) -> None:
    model = Triangular()
    with pytest.warns(GraphparWarning, match="linalg_qr") as caught:
        equivalent(model, torch.randn(2, 8, 8, requires_grad=True), tp=2, sp=sp)
    line = Triangular.forward.__code__.co_firstlineno + 2
    assert f"test_cases.py:{line}: return self.down(torch.linalg.qr" in str(caught[0].message)


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
                assert tuple(value.shape) == local_shape(tensor_spec(node).shape, kind, 4), node
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


class RelativeBias(nn.Module):
    def __init__(self, heads: int = 4, d: int = 4) -> None:
        super().__init__()
        self.heads, self.d, width = heads, d, heads * d
        self.bias = nn.Embedding(32, heads)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.o = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        place = torch.arange(s)
        bias = self.bias(place[None] - place[:, None] + 16).permute(2, 0, 1).unsqueeze(0)
        for qkv, o in zip(self.qkv, self.o, strict=True):
            q, k, v = (
                t.view(b, s, self.heads, self.d).transpose(1, 2) for t in qkv(x).chunk(3, -1)
            )
            chances = torch.softmax(q @ k.transpose(-1, -2) / 2 + bias, -1)
            x = x + o((chances @ v).transpose(1, 2).reshape(b, s, w))
        return x


@both_sp
def test_c11_relative_position_bias(sp: bool) -> None:
    model = RelativeBias()
    equivalent(model, torch.randn(2, 8, 16, requires_grad=True), tp=2, sp=sp)


class ComplexRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angle), angle))
        self.freqs: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 4)
        pairs = torch.view_as_complex(q.reshape(b, s, 4, -1, 2)) * self.freqs[None, :, None, :]
        return self.o(torch.view_as_real(pairs).flatten(3).reshape(b, s, 16))  # type: ignore[no-any-return]


@both_sp
def test_c12_complex_rotary_embedding(sp: bool) -> None:
    equivalent(ComplexRotary(), torch.randn(2, 6, 16, requires_grad=True), tp=2, sp=sp)


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), mlp(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.layer(self.norm(x))
        return x


class TwoPlaces(nn.Module):
    """One Linear between heads, where it is sharded, and after an op that keeps axes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shared, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.relu(self.shared(x)))
        return y, torch.softmax(self.shared(torch.softmax(self.up(x), -1)), -1)


@both_sp
def test_c13_one_layer_used_three_times(sp: bool) -> None:
    program = equivalent(Thrice(), torch.randn(2, 8, 16, requires_grad=True), tp=4, sp=sp)
    assert {"layer.0.weight", "layer.2.weight"} <= set(sharded_state(program))


@both_sp
def test_c13_one_linear_in_a_sharded_and_a_replicated_place(sp: bool) -> None:
    equivalent(TwoPlaces(), torch.randn(2, 8, 16, requires_grad=True), tp=4, sp=sp)


# --- gradients ----------------------------------------------------------------------------------


class PreNorm(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


def two_blocks() -> nn.Sequential:
    return nn.Sequential(PreNorm(), PreNorm(), nn.LayerNorm(16))


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


class SecondBias(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.down.bias.data.fill_(100.0)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.form == "module":
            return self.down(h)  # type: ignore[no-any-return]
        if self.form == "function":
            return F.linear(h, self.down.weight) + self.down.bias
        return h @ self.down.weight.T + self.down.bias


@both_sp
@pytest.mark.parametrize("form", ["module", "function", "product"])
def test_c21_row_parallel_bias(form: str, sp: bool) -> None:
    model, x = SecondBias(form), torch.randn(2, 8, 8, requires_grad=True)
    program = equivalent(model, x, tp=4, sp=sp)
    assert program.state["down.weight"].type == Shard(1, (16,))
    assert program.state["down.bias"].type == I
    assert Traffic(program, model, x).counts == (1, 1)


def freeze(model: nn.Module, *endings: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if any(f".{e}." in f".{name}" for e in endings):
            parameter.requires_grad_(False)
    return model


FROZEN = [("q",), ("k",), ("v",), ("q", "k", "v"), ("norm_1", "norm_2", "2"), ("mlp",)]


@both_sp
@pytest.mark.parametrize("names", FROZEN, ids="-".join)
def test_c22_frozen_parts(names: tuple[str, ...], sp: bool) -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    model = freeze(two_blocks(), *names)
    program = equivalent(model, x, tp=4, sp=sp)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    simulation = Traffic(program, model, x).simulation
    assert frozen
    assert all(g is None for n in frozen for g in simulation.rank_gradients(n))


@both_sp
def test_c22_frozen_norms_cost_no_collective(sp: bool) -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    model = freeze(two_blocks(), "norm_1", "norm_2", "2")
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


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.c, self.d = nn.Linear(32, 2, bias=False), nn.Linear(2, 16, bias=False)
        freeze(self, "up", "down")

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x) + math.pi * self.b(self.a(x)))
        return self.down(h) + math.pi * self.d(self.c(h))  # type: ignore[no-any-return]


@both_sp
@pytest.mark.parametrize("given", [False, True])
def test_c22_low_rank_pairs(given: bool, sp: bool) -> None:
    model, x = Lora(), torch.randn(2, 8, 16, requires_grad=given)
    program = equivalent(model, x, tp=4, sp=sp)
    grads = Traffic(program, model, x).simulation.rank_gradients("up.weight")
    assert all(g is None for g in grads)
