"""Recomputation in a block under tensor and sequence parallelism: kept bytes at equal replay time.

    python benchmarks/recompute_sharded.py

One rank of eight of a GPT block in 16 bits without dropout, on the meta device. The peer is the
block cut by hand with PyTorch's functional collectives (as Korthikanti et al. 2022, figure 5),
eager and under ``torch.compile`` with ``activation_memory_budget``; there collectives are nodes
like any other, and PyTorch's partitioner keeps what they give. graphpar partitions the plain block,
and for each point of the peer takes the plan that keeps least in the same modelled time of replay
(an H100's data sheet; the peer's replay is what forward and backward take beyond those at a budget
of 1). "kept" is per rank, without parameters, in units of sbh elements; "formula" is the
paper's (34 + 5 a s / h) / t without what dropout keeps, halved: of elements, not bytes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from _common import report, table
from recompute_block import Variant, compiled
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphpar.cost import Roofline, dry_run, find_hardware
from graphpar.passes.apply_recompute import graph_runs
from graphpar.passes.choose_recompute.blocks import Curve, curve_of
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.trace import trace

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.paper_gpt import Layer, Size

RANKS = 8
SIZE = Size(a=32, b=1, h=4096, l=1, s=2048, t=RANKS)
BUDGETS = (1.0, 0.5, 0.2, 0.05, 0.0)
TIMES = Roofline(hardware=find_hardware("h100"))


class ByHand(nn.Module):
    """What one rank does of the block: [s / t, b, h] to [s / t, b, h]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        h, self.heads, self.group = SIZE.h, SIZE.a // RANKS, group
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h // RANKS), nn.Linear(h // RANKS, h)
        self.up, self.down = nn.Linear(h, 4 * h // RANKS), nn.Linear(4 * h // RANKS, h)

    def gathered(self, x: Tensor) -> Tensor:
        return collectives.all_gather_tensor_autograd(x, 0, self.group)

    def scattered(self, x: Tensor) -> Tensor:
        return collectives.reduce_scatter_tensor_autograd(x, "sum", 0, self.group)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.gathered(self.norm_1(x)))
        s, b, d = y.shape[0], y.shape[1], SIZE.h // SIZE.a
        q, k, v = y.view(s, b * self.heads, 3 * d).transpose(0, 1).chunk(3, -1)
        weights = (torch.bmm(q, k.transpose(1, 2)) * d**-0.5).softmax(-1)
        context = torch.bmm(weights, v).transpose(0, 1).reshape(s, b, -1)
        partial = F.linear(context, self.projection.weight)
        x = x + self.scattered(partial) + self.projection.bias
        y = F.gelu(self.up(self.gathered(self.norm_2(x))))
        return x + self.scattered(F.linear(y, self.down.weight)) + self.down.bias


def peers() -> Iterator[Variant]:
    store = FakeStore()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=store, rank=0, world_size=RANKS)
    assert dist.group.WORLD is not None
    with torch.device("meta"):
        module = ByHand(dist.group.WORLD).bfloat16()
        x = torch.empty(SIZE.s // RANKS, SIZE.b, SIZE.h, dtype=torch.bfloat16, requires_grad=True)
    yield Variant(name="eager", module=module, forward=module).count(x, TIMES)
    none = None
    for budget in BUDGETS:
        made = compiled(f"torch.compile, budget {budget}", module, budget, none)
        none = none or made
        yield made.count(x, TIMES)
    dist.destroy_process_group()


def curve() -> Curve:
    """The plans of the layer in the middle of three, whose input the layer before keeps."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(SIZE, dropout=0.0) for _ in range(3))).bfloat16()
        x = torch.empty(SIZE.s, SIZE.b, SIZE.h, dtype=torch.bfloat16, requires_grad=True)
    pipeline = default_pipeline(tp=RANKS, sp=True)
    program = list(run_pipeline(trace(model, (x,)), pipeline).values())[-1]
    (block,) = program.blocks
    return curve_of(graph_runs(program, dry_run(program))[block], TIMES)


def main() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", "`torch.distributed._functional_collectives")  # torch 2.11
    unit = SIZE.s * SIZE.b * SIZE.h * 2  # bytes
    found = curve()
    formula = (32 + 2 * SIZE.a * SIZE.s / SIZE.h) / 2 / RANKS
    rows = []
    for peer in peers():
        replay_us = 0.0 if peer.base is None else max(peer.us - peer.base.us, 0.0)
        plans = [p for p in (found.none, *found.plans) if p.replay_us <= replay_us + 1e-6]
        mine = min(plans, key=found.kept_bytes)
        rows.append(
            [
                peer.name,
                f"{peer.kept / unit:.3f}",
                f"{replay_us:.1f}",
                f"{found.kept_bytes(mine) / unit:.3f}",
                f"{mine.replay_us:.1f}",
            ]
        )
    head = ["peer", "kept, sbh", "replay, us", "ours", "replay, us"]
    body = f"{table(head, rows)}\n\nformula: {formula:.3f}; forward: {found.forward_us:.0f} us"
    report("recompute_sharded", "Recomputation in a block of one rank of eight", body)


if __name__ == "__main__":
    main()
