"""Values that are kept inside a region: a plan is carried out as it was found, not more of it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import graphpar
from graphpar.cost import Roofline, SavedTensors, dry_run, find_hardware
from graphpar.interpret import model_state
from graphpar.passes.apply_recompute import apply_recompute
from graphpar.passes.apply_recompute.regions import random_by_generator
from graphpar.passes.choose_recompute.blocks import BlockPlan, Curve, curve_of
from graphpar.printer import format_python
from graphpar.program import Program, annotate, copy_program, info, program_hash
from graphpar.runtime import compile_program
from graphpar.verify import verify
from tests.unit.recompute_checks import Trained, check, train

TIMES = Roofline(hardware=replace(find_hardware("h100"), launch_us=0.0))
WIDTH, HEADS, SEQ, BATCH = 32, 4, 16, 2


class Decoder(nn.Module):
    """A pre-norm layer: rotated queries and keys, fused attention, dropout, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 72), nn.Linear(WIDTH, 72)
        self.down = nn.Linear(72, WIDTH)
        self.dropout = nn.Dropout(0.2)
        angles = torch.outer(torch.arange(SEQ), 10000 ** (-torch.arange(4) / 4)).repeat(1, 2)
        self.angles = nn.ParameterDict({"cos": angles.cos(), "sin": angles.sin()})
        self.angles.requires_grad_(False)

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        y: Tensor = x * self.angles["cos"] + torch.cat((-right, left), -1) * self.angles["sin"]
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (
            p(y).view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.dropout(self.o(a.transpose(1, 2).reshape(BATCH, SEQ, WIDTH)))
        y = self.norm_2(x)
        y = self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))
        return (x + y).square().mean()  # type: ignore[no-any-return]


@functools.cache
def decoder(rng: str) -> tuple[Program, dict[str, Tensor], list[Tensor], Curve]:
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(BATCH, SEQ, WIDTH, requires_grad=True)
    made = graphpar.transform(model, (x,), tp=1, rng=rng, recompute="none")
    return made.program, model_state(model), [x], curve_of(dry_run(made.program), TIMES)


@functools.cache
def plain(rng: str) -> Trained:
    program, state, leaves, _ = decoder(rng)
    return train(program, state, leaves)


def applied(program: Program, plan: BlockPlan) -> Program:
    marked = copy_program(program)
    names = {node.name for node in plan.replay}
    for node in marked.graph.nodes:
        if node.name in names:
            annotate(node, replay=True)
    return apply_recompute(marked)


def plans(curve: Curve) -> list[BlockPlan]:
    """The fastest at some budgets between all and the least."""
    most = curve.kept_bytes(curve.none)
    least = min(map(curve.kept_bytes, curve.plans))
    found = [curve.within(least + (most - least) * tenth // 10) for tenth in range(10)]
    return [plan for plan in found if plan is not None]


@pytest.mark.parametrize("rng", ["invariant", "exact", "per-rank"])
def test_plans_are_carried_out_to_the_byte(rng: str) -> None:
    program, state, leaves, curve = decoder(rng)
    held = 0
    for plan in plans(curve):
        place = {node: i for i, node in enumerate(curve.nodes)}
        nbytes, ps = curve.problem.cost([place[node] for node in plan.replay])
        random = any(random_by_generator(node) for node in plan.regions.members)
        if not random:  # whose draws before are made again too
            assert curve.kept_bytes(plan) == nbytes
            assert plan.replay_us <= (ps + len(curve.nodes)) / 1e6  # each rounded to one
        done = applied(program, plan)
        found = check(done, plain(rng), state, leaves)
        assert found.saved_bytes == curve.kept_bytes(plan)
        held += "holds=True" in format_python(done)
    assert held > 2


def holding(rng: str = "invariant") -> Program:
    """Attention's result is held for its own backward, and its operands are made again."""
    program, _, _, curve = decoder(rng)
    (attention,) = (n for n in curve.nodes if "attention" in str(n.target))
    (norm,) = (n for n in curve.nodes if n.name == "rms_norm")
    stack, before = [attention], set[fx.Node]()
    while stack:
        for value in stack.pop().all_input_nodes:
            if value not in before and value.op == "call_function":
                before.add(value)
                stack.append(value)
    assert norm in before
    place = {node: i for i, node in enumerate(curve.nodes)}
    return applied(program, curve.plan([place[n] for n in before if n in place]))


def test_attention_is_not_run_again_for_its_operands() -> None:
    """Its result and statistics are kept inside; PyTorch's selective checkpoints do as much."""
    program = holding()
    (attention,) = (n for n in program.graph.nodes if "attention" in str(n.target))
    assert info(attention).held
    assert not info(attention).replay
    again = [k.op for k in dry_run(program).replayed]
    assert "aten.mm" in again
    assert not any("attention" in op for op in again)
    _, state, leaves, _ = decoder("invariant")
    check(program, plain("invariant"), state, leaves)


def test_what_is_held_is_part_of_what_ranks_compare_and_verify() -> None:
    program = holding()
    (attention,) = (n for n in program.graph.nodes if "attention" in str(n.target))
    less = copy_program(program)
    for node in less.graph.nodes:
        if node.name == attention.name:
            annotate(node, held=False)
    assert program_hash(less) != program_hash(program)
    verify(program)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiled_regions_hold_as_much(backend: str) -> None:
    """The compiler keeps what is held, and does not run attention again for it."""
    program = holding()
    _, state, leaves, _ = decoder("invariant")
    model = Decoder()
    model.load_state_dict(state)
    kept = []
    for forward in (compile_program(program), None):
        run = forward or torch.compile(compile_program(program), backend=backend, fullgraph=True)
        model.zero_grad()
        torch.manual_seed(1)
        with SavedTensors([*model.parameters(), *model.buffers()]) as saved:
            (y,) = run(model, *leaves)
            kept.append(saved.nbytes)
        y.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if forward is not None:
            expected = [g.clone() for g in gradients]
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert kept[1] <= kept[0]
