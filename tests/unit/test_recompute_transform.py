"""Recomputation through the public entry: modes, budgets, hardware, compilers, bad input."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphpar
from graphpar.cost import SavedTensors, dry_run
from graphpar.errors import GraphparWarning, InputError
from graphpar.parallel_module import ParallelModule
from graphpar.passes.choose_recompute import ChooseRecompute, choose_recompute, parse_bytes
from graphpar.passes.choose_recompute.budget import format_bytes
from graphpar.printer import format_python
from graphpar.runtime import compile_program
from tests.unit.test_rng import IDS, c40

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler"),
        ],
    ),
]


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(self.dropout(torch.tanh(self.up(self.norm(x))))))
        return y


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x


def net(layers: int = 4) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers))), torch.randn(4, 8, 16)


def gradients(parallel: nn.Module, x: Tensor) -> list[Tensor]:
    parallel.zero_grad()
    torch.manual_seed(3)
    parallel(x).square().sum().backward()
    return [p.grad.clone() for p in parallel.parameters() if p.grad is not None]


def saved_bytes(parallel: ParallelModule, x: Tensor) -> int:
    with SavedTensors(parallel.local_tensors().values()) as saved:
        output = parallel(x)
        assert output is not None
        return saved.nbytes


def test_layers_under_several_plans() -> None:
    """A layer's function may have the name of a layer's result: h_2."""
    torch.manual_seed(0)
    model = Layers(6)
    x = torch.randn(4, 8, 16)
    plain = graphpar.transform(model, (x,), tp=1, recompute="none")
    full = graphpar.transform(model, (x,), tp=1, recompute="full").report["recompute"]
    least = full.state_bytes + full.saved_bytes + full.transient_bytes
    most = 0
    for extra in range(8 << 10, full.none_bytes - full.saved_bytes, 37 << 10):
        made = graphpar.transform(model, (x,), tp=1, memory_budget=least + extra)
        most = max(most, len(made.program.blocks))
        assert all(map(torch.equal, gradients(made, x), gradients(plain, x)))
    assert most > 1


@pytest.mark.parametrize("rng", ["invariant", "exact", "per-rank"])
def test_gradients_are_those_without_recomputation(rng: str) -> None:
    """C41: dropout among what is replayed."""
    model, x = net()
    plain = graphpar.transform(model, (x,), tp=1, rng=rng, recompute="none")
    full = graphpar.transform(model, (x,), tp=1, rng=rng, recompute="full")
    found, expected = gradients(full, x), gradients(plain, x)
    assert len(found) == len(expected) == 24
    assert all(map(torch.equal, found, expected))
    again = gradients(full, x)
    assert all(map(torch.equal, again, expected))
    assert saved_bytes(full, x) == dry_run(full.program).saved_bytes
    assert saved_bytes(full, x) < saved_bytes(plain, x) / 4
    assert "ops.recompute(region_0" in format_python(full.program)


def slopes(module: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss's derivative along random changes of the parameters, and central differences."""

    def value() -> Tensor:
        torch.manual_seed(7)
        loss: Tensor = module(ids).square().mean()
        return loss

    value().backward()
    parameters = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    pairs = [
        (p.to_local(), g.to_local())
        if isinstance(p, DTensor) and isinstance(g, DTensor)
        else (p, g)
        for p, g in parameters
    ]
    torch.manual_seed(5)
    ways = [torch.randn_like(g) for _, g in pairs]
    slope = torch.stack([(g * way).sum() for (_, g), way in zip(pairs, ways, strict=True)]).sum()
    values, eps = [], 1e-6
    for step in (eps, -2 * eps):
        with torch.no_grad():
            for (p, _), way in zip(pairs, ways, strict=True):
                p += step * way
        values.append(value().detach())
    return slope, (values[0] - values[1]) / (2 * eps)


@pytest.mark.parametrize(
    "rng", ["invariant", *(pytest.param(r, marks=pytest.mark.long) for r in ("exact", "per-rank"))]
)
def test_replayed_dropout_against_finite_differences(rng: str) -> None:
    """C41: of the same forward, with every setting."""
    full = graphpar.transform(c40(), (IDS,), tp=1, rng=rng, recompute="full")
    report = full.program.report["recompute"]
    least = report.state_bytes + report.saved_bytes + report.transient_bytes
    some = least + (report.none_bytes - report.saved_bytes) // 3
    settings: list[dict[str, Any]] = [{"recompute": mode} for mode in ("none", "selective", "full")]
    replayed = []
    for setting in (*settings, {"memory_budget": some}):
        made = graphpar.transform(c40(), (IDS,), tp=1, rng=rng, **setting)
        found = made.program.report.get("recompute")
        replayed.append(found is not None and found.replay_us > 0)
        slope, difference = slopes(made, IDS)
        torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-8)
    assert replayed[2:] == [True, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled(compiler: str) -> None:
    """The module; and its program as one graph, of which the compiler keeps as little."""
    model, x = net(1)
    plain = graphpar.transform(model, (x,), tp=1, recompute="none")
    full = graphpar.transform(model, (x,), tp=1, recompute="full")
    compiled = torch.compile(full, backend=compiler)
    found, expected = gradients(compiled, x), gradients(plain, x)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    kept = []
    for parallel in (plain, full):
        forward = compile_program(parallel.program)
        root = parallel._roots[0]
        whole = torch.compile(forward, backend=compiler, fullgraph=True)
        with SavedTensors(parallel.local_tensors().values()) as saved:
            (result,) = whole(root, x)
            kept.append(saved.nbytes)
            assert result.requires_grad
    assert kept[1] < kept[0] / 2


def test_a_budget_is_kept() -> None:
    model, x = net()
    plain = graphpar.transform(model, (x,), tp=1)
    state = 4 * sum(p.nbytes for p in plain.parameters())
    most = state + saved_bytes(plain, x)
    fitted = graphpar.transform(model, (x,), tp=1, memory_budget=most - 10_000)
    report = fitted.program.report["recompute"]
    assert report.state_bytes == state
    assert saved_bytes(fitted, x) == report.saved_bytes <= most - 10_000 - state
    assert all(map(torch.equal, gradients(fitted, x), gradients(plain, x)))
    exact = graphpar.transform(model, (x,), tp=1, memory_budget=most)
    assert saved_bytes(exact, x) == most - state


def test_the_memory_of_the_hardware_is_the_budget() -> None:
    model, x = net(1)
    small = graphpar.transform(model, (x,), tp=1, hardware="a100-40gb")
    assert "choose-recompute{budget_bytes=42949672960}" in small.pipeline
    assert small.program.report["recompute"].replay_us == 0
    assert "recompute" not in graphpar.transform(model, (x,), tp=1).program.report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "most"}, "recompute must be one of 'none', 'selective', 'full', 'auto'"),
        ({"memory_budget": "40 apples"}, "cannot read '40 apples' as bytes"),
        ({"memory_budget": 0}, "must be positive"),
        ({"memory_budget": 2.5}, "bytes or a text"),
        ({"memory_budget": True}, "bytes or a text"),
        ({"hardware": "abacus"}, "no hardware is named 'abacus'; known: a100-40gb"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    model, x = net(1)
    with pytest.raises(InputError, match=message):
        graphpar.transform(model, (x,), tp=1, **options)


def test_a_budget_below_the_parameters() -> None:
    model, x = net()
    with pytest.raises(InputError, match=r"memory_budget of 1000 B .* is too small") as error:
        graphpar.transform(model, (x,), tp=1, memory_budget=1000)
    notes = "\n".join(error.value.__notes__)
    assert "parameters, gradients and AdamW's moments take" in notes


def test_a_limit_that_nobody_asked_for_warns() -> None:
    model, x = net()
    program = list(graphpar.transform(model, (x,), tp=1).stages.values())[-1]
    options = ChooseRecompute(budget_bytes=1000, must_fit=False)
    with pytest.warns(GraphparWarning, match=r"the least that works is \d+ bytes .* is taken"):
        least = choose_recompute(program, options)
    full = choose_recompute(program, ChooseRecompute(mode="full"))
    assert least.report["recompute"].saved_bytes <= full.report["recompute"].saved_bytes


def test_bytes_as_people_write_them() -> None:
    assert parse_bytes("40GiB") == 40 * 2**30
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("12") == parse_bytes(12) == parse_bytes("12B") == 12
    sizes = (5000, 12_345_678, 3 * 2**40)
    assert [format_bytes(n) for n in sizes] == ["5000 B", "11.77 MiB", "3.00 TiB"]


class Attention(nn.Module):
    """An attention block with the fused op."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, 256))  # type: ignore[no-any-return]


def test_fused_attention_is_not_replayed_for_nothing() -> None:
    """C52: the core's output is kept for the projection all the same."""
    x = torch.randn(2, 512, 256)
    parallel = graphpar.transform(Attention(), (x,), tp=1, recompute="selective", hardware="h100")
    replayed = [
        row.op for plan in parallel.program.report["recompute"].plans for row in plan.replayed
    ]
    assert not any("attention" in op for op in replayed)


class InPlace(nn.Module):
    """C54: an op in place after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        nn.functional.selu_(h)
        return self.last(h).exp()  # type: ignore[no-any-return]


def test_ops_in_place_are_replayed_alike() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(4, 8)
    full = graphpar.transform(model, (x,), tp=1, recompute="full")
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    for one, other in zip(gradients(full, x), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_gathered_tensor_is_not_kept() -> None:
    """C50: the shard is, and gathered again: by products, or by what backward runs again."""
    with torch.device("meta"):
        model = Block(4096, dropout=0.0)
        x = torch.empty(2, 2048, 4096, requires_grad=True)
    whole = 4 * 2 * 2048 * 4096
    plain = [transform_of(model, x, "none", overlap=overlap) for overlap in (False, True)]
    sizes = [dry_run(each.program).saved_bytes for each in plain]
    assert sizes[0] - sizes[1] == whole - whole // 4
    for overlap, ops in ((True, []), (False, ["graphpar.all_gather.default"])):
        full = transform_of(model, x, "full", overlap=overlap)
        (plan,) = full.program.report["recompute"].plans
        assert [row.op for row in plan.replayed if "all_" in row.op] == ops
        assert not any("all_" in row.op for row in plan.saved)
        assert dry_run(full.program).saved_bytes == whole // 4


def transform_of(model: nn.Module, x: Tensor, recompute: str, *, overlap: bool) -> Any:
    options: Any = {"tp": 4, "sp": True, "recompute": recompute, "overlap": overlap}
    return graphpar.transform(model, (x,), **options)
