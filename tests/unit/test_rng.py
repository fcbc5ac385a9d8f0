"""Masks of dropout: case C40 in all modes, and every op that drops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import graphpar
from graphpar import ops, simulate
from graphpar.cost.kernels import KernelRecorder
from graphpar.errors import InputError
from graphpar.interpret import model_state, run
from graphpar.ops.seeded import own_dropout, part_dropout
from graphpar.pipeline import parse_pipeline, run_pipeline
from graphpar.program import Program, info, program_hash, tensor_spec
from graphpar.simulate import Simulation, run_ranks
from graphpar.testing import assert_equivalent, compare, rewrite
from graphpar.trace import bind, trace
from graphpar.types import Shard
from graphpar.verify.node import SEEDED
from tests.distributed.harness import run_threads

WIDTH = HEADS = 24
P = 0.5


class Layer(nn.Module):
    """Attention with dropped probabilities, and a dropped residual."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        weights = F.dropout(self.weigh(q @ k.transpose(-2, -1)), P, self.training)
        y = (weights @ v).transpose(1, 2).reshape(b, s, WIDTH)
        return x + F.dropout(self.out(y), P, self.training)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


class ThreeDropouts(nn.Module):
    """C40: dropout of the embedding, of attention probabilities and of the residual."""

    def __init__(self, weigh: Callable[[Tensor], Tensor] = softmax) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(Layer(weigh), Layer(weigh))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embedding(ids), P, self.training)
        y: Tensor = self.layers(x)
        return y


IDS = torch.randint(16, (2, 24), generator=torch.Generator().manual_seed(0))


def c40() -> ThreeDropouts:
    torch.manual_seed(0)
    return ThreeDropouts().double()


def whole_numbers() -> ThreeDropouts:
    """A model whose sums are exact in float64, so that no order of them matters: each row of a
    weight has one element, 1 or -1."""
    model = ThreeDropouts(lambda x: x.clamp(0, 1)).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            rows = torch.randint(WIDTH, (layer.out_features,))
            layer.weight.copy_(F.one_hot(rows, WIDTH) * (1 - 2 * (rows[:, None] % 2)))
    return model


def step(program: Program, model: nn.Module, seed: int = 0) -> tuple[Simulation, list[Tensor]]:
    """Outputs by rank, after a backward of their sums of squares."""
    torch.manual_seed(seed)
    simulation, outputs = run_ranks(program, model_state(model), [IDS])
    found = [values[0] for values in outputs]
    torch.autograd.backward([y.square().sum() for y in found])
    return simulation, found


def seeded(program: Program) -> list[fx.Node]:
    return [n for _, graph in program.graphs() for n in graph.nodes if n.target in SEEDED]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 4, 5, 7, 8])
def test_invariant_is_the_same_bit_for_bit(tp: int, sp: bool) -> None:
    model = whole_numbers()
    alone, (expected,) = step(rewrite(model, (IDS,), tp=1, rng="invariant"), model)
    program = rewrite(model, (IDS,), tp=tp, sp=sp, rng="invariant")
    assert any(isinstance(info(node).type, Shard) for node in seeded(program))
    simulation, found = step(program, model)
    assert expected.any()
    for output in found:
        assert output.equal(expected)
    for name, _ in model.named_parameters():
        grad, wanted = simulation.gradient(name), alone.gradient(name)
        assert grad is not None
        assert wanted is not None
        assert grad.equal(wanted), name
        assert 0 < grad.abs().max() < 2**52


@pytest.mark.parametrize("rng", ["exact", "invariant"])
@pytest.mark.parametrize("tp", [1, 2, 5, 8])
def test_c40(tp: int, rng: str) -> None:
    """Exact: equal to the unmodified model; invariant: to the model rewritten for one rank."""
    for sp in (False, True):
        assert assert_equivalent(c40(), (IDS,), tp=tp, sp=sp, rng=rng).compared > 5


def test_each_step_and_each_layer_has_its_own_masks() -> None:
    model = nn.Sequential(Keep(), Keep())
    ones = torch.ones(4, 64)
    parallel = graphpar.transform(model, (ones,), tp=1)
    torch.manual_seed(3)
    first, second = parallel(ones), parallel(ones)
    torch.manual_seed(3)
    again = parallel(ones)
    masks = [*first[1:], *second[1:]]
    assert len(parallel.program.calls) == 2
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    for i, mask in enumerate(masks):
        assert {*mask.unique().tolist()} == {0.0, 2.0}
        assert not any(mask.equal(other) for other in masks[:i])


class Keep(nn.Module):
    """A block that tells its two masks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        x, *masks = x if isinstance(x, tuple) else (x,)
        y = F.dropout(torch.ones_like(x), P), F.dropout(torch.ones_like(x), P)
        z = self.b(self.a(x))
        return (z, *masks, *y)


def test_eval_drops_nothing_and_draws_nothing() -> None:
    model = c40().eval()
    assert not seeded(rewrite(model, (IDS,), tp=2, rng="invariant"))
    parallel = graphpar.transform(model, (IDS,), tp=1)
    state = torch.get_rng_state()
    assert parallel(IDS).equal(model(IDS))
    assert torch.get_rng_state().equal(state)


def test_the_gradient_is_that_of_the_same_forward() -> None:
    model = c40()
    program = rewrite(model, (IDS,), tp=2, sp=True, rng="invariant")
    simulation, _ = step(program, model)
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    slope = 0.0
    for name, d in direction.items():
        grad = simulation.gradient(name)
        assert grad is not None
        slope += float((grad * d).sum())
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p.add_(direction[name], alpha=sign * 1e-6)
        losses.append(float(step(program, moved)[1][0].square().sum().detach()))
    assert abs((losses[0] - losses[1]) / 2e-6 - slope) < 1e-5 * abs(slope)


def test_backward_keeps_the_seed_alone() -> None:
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    seed = ops.draw_seed(x.device)
    saved: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        y = ops.seeded_dropout(x, seed, P, 1)
    assert [value.shape for value in saved] == [(2,)]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert ((y != 0) == (grad != 0)).all()
    assert torch.autograd.gradcheck(lambda x: ops.seeded_dropout(x, seed, P, 1), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.seeded_dropout(x, seed, P, 1), x)
    saved.clear()
    parallel = graphpar.transform(c40(), (IDS,), tp=1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        parallel(IDS)
    masks = [v for v in saved if v.numel() > 2 and {*v.unique().tolist()} <= {0.0, 1.0, 2.0}]
    assert saved
    assert not masks


def test_a_mask_is_applied_at_once() -> None:
    """The op of devices other than the CPU: the same bits, the mask alone is kept."""
    mask, scale = torch.rand(4, 6) > P, 1 / (1 - P)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    apply = torch.ops.graphpar.apply_mask.default
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        y = apply(x, mask, scale)
    assert [v is mask or v.equal(mask) for v in kept] == [True]
    assert y.equal(x * mask * scale)
    assert y.equal(torch.ops.aten.native_dropout_backward(x, mask, scale))  # of a GPU
    assert torch.autograd.gradcheck(lambda x: apply(x, mask, scale), x)
    assert torch.autograd.gradgradcheck(lambda x: apply(x, mask, scale), x)
    with FakeTensorMode(), KernelRecorder() as recorder:
        own_dropout(torch.empty(4, device="meta"), torch.empty(2), P, 0, None)
    assert [k.op for k in recorder.kernels] == ["graphpar.dropout_bits", "graphpar.apply_mask"]


def test_a_replay_drops_the_same() -> None:
    """A region that is run again needs no state of a generator."""
    x = torch.randn(6, 8, requires_grad=True)
    for drop in (ops.seeded_dropout, ops.rank_dropout):
        seed = ops.draw_seed(x.device)

        def region(x: Tensor, drop: Any = drop, seed: Tensor = seed) -> Tensor:
            return drop(x.exp(), seed, P, 0)  # type: ignore[no-any-return]

        (expected,) = torch.autograd.grad(region(x).sum(), x)
        y = checkpoint(region, x, use_reentrant=False, preserve_rng_state=False)
        torch.rand(3)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.equal(expected)


def test_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of sharded values differ between ranks, those of whole values do not."""
    drawn: dict[tuple[int, int], list[Tensor]] = {}

    def recorded(x: Tensor, seed: Tensor, p: float, number: int, rank: int | None) -> Tensor:
        y = own_dropout(torch.ones_like(x), seed, p, number, rank)
        drawn.setdefault((int(seed[1]), number), []).append(y)
        return x * y

    monkeypatch.setattr(simulate, "own_dropout", recorded)
    model = c40()
    program = rewrite(model, (IDS,), tp=2, rng="per-rank")
    kinds = {n.args[3]: info(n).type for n in seeded(program) if n.graph is not program.graph}
    assert sorted(isinstance(kind, Shard) for kind in kinds.values()) == [False, True]
    _, outputs = step(program, model)
    assert outputs[0].equal(outputs[1])
    for (call, number), (one, other) in drawn.items():
        sharded = call > 0 and isinstance(kinds[number], Shard)
        assert one.equal(other) != sharded
    before = outputs[0]
    assert step(program, model)[1][0].equal(before)
    assert not step(program, model, seed=1)[1][0].equal(before)
    with pytest.raises(InputError, match="promises no equality"):
        assert_equivalent(model, (IDS,), tp=2, rng="per-rank")


def on_threads(rank: int, group: str, seed: Tensor) -> tuple[Tensor, Tensor]:
    part = torch.ones(4, 8)
    return (
        ops.seeded_dropout(part, seed, P, 1, 1, (16,), group),
        ops.rank_dropout(part, seed, P, 1, 1, (16,), group),
    )


def test_ranks_of_a_group() -> None:
    seed = ops.call_seed(ops.draw_seed(torch.device("cpu")), 3)
    invariant, own = zip(*run_threads(2, on_threads, seed), strict=True)
    assert torch.cat(invariant, 1).equal(ops.seeded_dropout(torch.ones(4, 16), seed, P, 1))
    assert not own[0].equal(own[1])
    for rank in range(2):
        assert own[rank].equal(own_dropout(torch.ones(4, 8), seed, P, 1, rank))
        alone = part_dropout(torch.ones(4, 8), seed, P, 1, 1, (16,), rank, 2)
        assert invariant[rank].equal(alone)


class Other(nn.Module):
    """One op that drops, between products."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop = drop
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.drop(torch.relu(self.up(x)))))
        return y


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout1d": lambda x: F.dropout1d(x, P),
    "dropout2d": lambda x: F.dropout2d(x.unflatten(2, (4, 4)), P).flatten(2),
    "alpha": lambda x: F.alpha_dropout(x, 0.25, True),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.25, True),
    "native": lambda x: torch.native_dropout(x, P, True)[0],
    "native_mask": lambda x: torch.mul(*torch.native_dropout(x, P, True)),
    "reshaped": lambda x: F.dropout(x, P).reshape(-1, 16).reshape(x.shape),
    "in_place": lambda x: F.dropout(x + 1, 0.3, True, inplace=True),
    "all": lambda x: F.dropout(x, 1.0),
    "none": lambda x: F.dropout(x, 0.0) + F.dropout(x, P, False),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=P, is_causal=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_op_that_drops(name: str) -> None:
    torch.manual_seed(0)
    model, args = Other(OTHERS[name]).double(), (torch.randn(4, 6, 8, dtype=torch.float64),)
    program = trace(model, *bind(model, args, None))
    split = list(run_pipeline(program, parse_pipeline("outline,split-dropout")).values())[-1]
    compare(split, model, args)  # the split form draws what the op draws
    for tp, sp in ((2, False), (2, True), (4, False)):
        found = assert_equivalent(model, args, tp=tp, sp=sp, rng="invariant")
        assert bool(seeded(found.program)) == (name not in ("all", "none"))
        rewrite(model, args, tp=tp, sp=sp, rng="per-rank")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, dropout=P, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(F.dropout(x, P))[0] + torch.rand_like(x)
        z: Tensor = F.dropout(self.down(torch.relu(self.up(y))), P)
        return z


def test_other_random_ops_run_whole() -> None:
    torch.manual_seed(0)
    with pytest.warns(graphpar.GraphparWarning):
        assert_equivalent(Recurrent(), (torch.randn(2, 4, 8),), tp=2, rng="invariant")


def test_the_program_tells_its_masks() -> None:
    """The hash covers them; the printed program runs; one rank runs it node by node."""
    model = c40()
    first, second = (rewrite(model, (IDS,), tp=2, rng=rng) for rng in ("invariant", "per-rank"))
    assert program_hash(first) != program_hash(second)
    alone = rewrite(model, (IDS,), tp=1, rng="invariant")
    assert all(tensor_spec(n).shape for n in seeded(alone))
    torch.manual_seed(5)
    expected = run(alone, model_state(model), [IDS])[0]
    torch.manual_seed(5)
    assert graphpar.transform(model, (IDS,), tp=1)(IDS).equal(expected)


def test_an_unknown_mode() -> None:
    with pytest.raises(InputError, match="rng must be one of 'invariant', 'exact', 'per-rank'"):
        graphpar.transform(c40(), tp=2, rng="none")
    with pytest.raises(InputError, match="rng must be one of 'invariant', 'per-rank', not 'exact'"):
        run_pipeline(rewrite(c40(), (IDS,), tp=1), parse_pipeline("seed-dropout{rng=exact}"))
    parsed = parse_pipeline("seed-dropout{rng=per-rank}")
    assert str(parsed[0]) == "seed-dropout{rng=per-rank}"


class Written(nn.Module):
    """A buffer under two names, written through both, before a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))  # no cast parts it
        self.register_buffer("other", self.total)
        self.total: Tensor
        self.other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.total.mul_(0.5)
        self.other.add_(1)
        return F.dropout(self.up(x + self.total), P, self.training)


@pytest.mark.parametrize("rng", ["invariant", "exact"])
def test_a_buffer_under_two_names_beside_a_dropout(rng: str) -> None:
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    assert_equivalent(Written().double(), (x,), tp=2, rng=rng, atol=1e-12)
