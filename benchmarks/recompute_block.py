"""Recomputation in one block: graphpar's plans against what PyTorch offers, at equal bytes.

    python benchmarks/recompute_block.py

A GPT block with dropout 0.1 and a Llama block. Peers: ``torch.compile`` with
``activation_memory_budget`` (PyTorch's own partitioner on the graphs of AOTAutograd, run without
code generation, so that all run the same kernels), selective checkpointing that saves the matrix
products (``create_selective_checkpoint_contexts``), and a checkpoint of the whole block. For each
of their points graphpar gets a budget of the same bytes.

"kept" are the storages that autograd holds after forward, parameters left out, in units of sbh
elements (sequence, batch, hidden size). "again" are FLOPs beyond one forward and backward, as a
part of forward. "modelled" and "measured" are the times of forward and backward over those without
recomputation; the former with this processor's measured rates, by which our plans are chosen, the
latter of runs that are interleaved, medians, one thread. "of peer" is our step over that of the
peer above, in the same rounds. "gradient" is, of the same block and twice
the bytes in float64, the difference of a directional derivative from finite differences of the same
program, with the random numbers of forward repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import report, table
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import graphpar
from graphpar.cost import Roofline, Times, calibrate_cpu, dry_run, total_us
from graphpar.cost.kernels import KernelRecorder
from graphpar.memory import LiveBytes
from graphpar.passes.apply_recompute import apply_recompute
from graphpar.passes.choose_recompute.blocks import curve_of
from graphpar.program import Program, annotate, copy_program
from graphpar.runtime import compile_program

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.paper_gpt import Layer, Size

S, B, H, HEADS = 512, 2, 256, 8
BUDGETS = (1.0, 0.5, 0.2, 0.0)
SEED_BYTES = 16  # from which masks are made again
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
Forward = Callable[[Tensor], Tensor]


class LlamaBlock(nn.Module):
    """A pre-norm decoder layer with RMSNorm, rotary positions and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(H), nn.RMSNorm(H)
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(H, 688, bias=False) for _ in range(2))
        self.down = nn.Linear(688, H, bias=False)
        d = H // HEADS
        angles = torch.outer(torch.arange(S), 10000 ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat((-right, left), -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (p(y).view(B, S, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, S, H))
        y = self.norm_2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def blocks() -> Iterator[tuple[str, nn.Module, Tensor]]:
    torch.manual_seed(0)
    yield "GPT, dropout 0.1", Layer(Size(a=HEADS, b=B, h=H, l=1, s=S)), torch.randn(S, B, H)
    yield "Llama", LlamaBlock(), torch.randn(B, S, H)


# --- what is measured ---------------------------------------------------------------------------


class Counter:
    """What the ops inside do: their kernels, and the bytes of what they make while it lives."""

    def __init__(self, module: nn.Module, *inputs: Tensor) -> None:
        present = [*module.parameters(), *module.buffers(), *inputs]
        self.recorder, self.live, self.on = KernelRecorder(), LiveBytes(present), False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.on:
            with self.recorder, self.live:
                yield
        else:
            yield


@dataclass(slots=True, kw_only=True)
class Variant:
    """``forward`` runs under ``counter``; what is compiled enters it by itself (``inside``).

    ``base`` is the variant of its kind that recomputes nothing. Times of one step.
    """

    name: str
    module: nn.Module
    forward: Forward
    base: Variant | None = None
    inside: bool = False
    kept: int = 0
    flops: int = 0
    us: float = 0.0
    seconds: list[float] = field(default_factory=list)
    error: float = 0.0
    counter: Counter = field(init=False)

    def __post_init__(self) -> None:
        self.counter = Counter(self.module)

    def step(self, x: Tensor) -> float:
        """Seconds of one forward and backward, without what frees the gradients."""
        started = time.perf_counter()
        self.forward(x).sum().backward()
        seconds = time.perf_counter() - started
        self.module.zero_grad()
        x.grad = None
        return seconds

    def over(self, other: Variant) -> float:
        """This variant's step over the other's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def count(self, x: Tensor, times: Times) -> Variant:
        """Kept bytes, FLOPs and modelled time of one step."""
        self.step(x)  # compiles
        self.counter = Counter(self.module, x)
        self.counter.on = True
        with nullcontext() if self.inside else self.counter():
            before = self.counter.live.now
            loss = self.forward(x).sum()
            self.kept = self.counter.live.now - before + x.nbytes
            loss.backward()
        self.counter.on = False
        self.module.zero_grad()
        x.grad = None
        self.flops = sum(kernel.flops for kernel in self.counter.recorder.kernels)
        self.us = total_us(times, self.counter.recorder.kernels)
        return self


def gradient_error(forward: Forward, x: Tensor) -> float:
    """Relative error of the directional derivative at ``x`` against central differences."""
    torch.manual_seed(3)
    weights, way = torch.randn_like(x), torch.randn_like(x)

    def value(at: Tensor) -> Tensor:
        torch.manual_seed(7)
        return (forward(at.requires_grad_()) * weights).sum()

    leaf = x.detach()
    value(leaf).backward()
    assert leaf.grad is not None
    found = (leaf.grad * way).sum().item()
    eps = 1e-5
    up, down = (value(x.detach() + e * way).item() for e in (eps, -eps))
    want = (up - down) / (2 * eps)
    return abs(found - want) / abs(want)


# --- the variants -------------------------------------------------------------------------------


def compiled(name: str, module: nn.Module, budget: float | None, base: Variant | None) -> Variant:
    """``torch.compile`` up to the partitioned graphs, which run op by op; without a budget, with
    the partition that saves all that backward reads."""
    variant = Variant(name=name, module=module, forward=module, base=base, inside=True)

    def run(graph: fx.GraphModule, _: Any) -> Any:
        def call(*args: Any) -> Any:
            with variant.counter():
                return graph(*args)

        return make_boxed_func(call)

    partition = default_partition if budget is None else min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    inner = torch.compile(module, backend=backend)

    def forward(x: Tensor) -> Tensor:
        with functorch_config.patch(activation_memory_budget=1.0 if budget is None else budget):
            out: Tensor = inner(x)
            return out

    variant.forward = forward
    return variant


def selective(module: nn.Module) -> Forward:
    """Save what matrix products make, run the rest again."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        save = op in PRODUCTS
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda x: checkpoint(module, x, use_reentrant=False, context_fn=contexts)


def peers(module: nn.Module) -> Iterator[Variant]:
    none = compiled("torch.compile, all saved", module, None, None)
    yield none
    for budget in BUDGETS:
        yield compiled(f"torch.compile, budget {budget}", module, budget, none)
    eager = Variant(name="eager", module=module, forward=module)
    yield eager
    for name, forward in (
        ("selective checkpoint", selective(module)),
        ("whole checkpoint", partial(checkpoint, module, use_reentrant=False)),
    ):
        yield Variant(name=name, module=module, forward=forward, base=eager)


def ours(module: nn.Module, x: Tensor, times: Times) -> Callable[[int | None], Variant]:
    """Makes our variant that keeps at most so many bytes, or all that autograd wants.

    ``memory_budget`` of ``transform`` is also for state and what a replay makes at once, which the
    peers do not count; here only what is kept has a limit.
    """
    plain = graphpar.transform(module, example_args=(x,), tp=1, recompute="none")
    program = plain.stages["seed-dropout"]
    run = dry_run(program)
    curve = curve_of(run, times)

    def made(name: str, program: Program, base: Variant | None = None) -> Variant:
        forward = compile_program(program)
        return Variant(name=name, module=module, forward=lambda x: forward(module, x)[0], base=base)

    none = made("graphpar, all saved", program)

    def variant(kept: int | None) -> Variant:
        if kept is None:
            return none
        kept += SEED_BYTES
        exact = curve.within(kept)
        plans = [exact, *curve.plans] if exact is not None else list(curve.plans)
        legal = [plan for plan in plans if curve.kept_bytes(plan) <= kept]
        plan = min(legal, key=lambda plan: plan.replay_us)
        marked = copy_program(program)
        names = {node.name for node in plan.replay}
        for node in marked.graph.nodes:
            if node.name in names:
                annotate(node, replay=True)
        return made("graphpar", apply_recompute(marked), none)

    return variant


# --- the table ----------------------------------------------------------------------------------


def rows(name: str, module: nn.Module, x: Tensor, times: Times, rounds: int) -> Iterator[list[str]]:
    with FlopCounterMode(display=False) as counter:
        module(x)
    forward_flops = counter.get_total_flops()
    x.requires_grad_()
    make = ours(module, x, times)
    variants: list[Variant] = []
    for each in peers(module):
        each.count(x, times)
        variants.append(each)
    pairs = [(each, make(each.kept)) for each in variants if each.base is not None]
    plain = make(None)
    mine = [plain, *(own for _, own in pairs)]
    for each in mine:
        each.count(x, times)
    for _ in range(rounds):
        for each in (*variants, *mine):
            each.seconds.append(each.step(x))
    module.double()
    wide = x.detach().double().requires_grad_()
    make_wide = ours(module, wide, times)
    for each in variants:
        each.error = gradient_error(each.forward, wide)
    for peer, own in ((None, plain), *pairs):
        again = make_wide(None if peer is None else 2 * peer.kept)
        own.error = gradient_error(again.forward, wide)
    module.float()
    ordered = [v for v in variants if v.base is None] + [plain]
    above = {id(own): peer for peer, own in pairs}
    for peer, own in pairs:
        ordered += [peer, own]
    for each in ordered:
        peer = above.get(id(each))
        base = each.base or each
        yield [
            f"{name}: {each.name}",
            f"{each.kept / x.nbytes:.2f}",
            f"{(each.flops - base.flops) / forward_flops:.1%}",
            f"{each.us / base.us - 1:+.1%}",
            f"{each.over(base) - 1:+.1%}",
            "" if peer is None else f"{each.over(peer):.3f}",
            f"{each.error:.0e}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Recomputation in one block, at equal bytes")
    parser.add_argument("--rounds", type=int, default=15, help="of time measurement")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    times = Roofline(hardware=calibrate_cpu())
    torch._dynamo.config.recompile_limit = 64
    warnings.filterwarnings("ignore", module="torch")
    head = [
        "block and variant",
        "kept, sbh",
        "again",
        "modelled",
        "measured",
        "of peer",
        "gradient",
    ]
    found = [row for each in blocks() for row in rows(*each, times, rounds)]
    title = "Recomputation in one block: at equal bytes, against PyTorch's"
    report("recompute_block", title, table(head, found))


if __name__ == "__main__":
    main()
