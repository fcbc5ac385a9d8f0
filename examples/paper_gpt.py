"""A GPT layer written as in Korthikanti et al. 2022, and the paper's memory table from its graph.

python examples/paper_gpt.py 22b

Bytes that one device keeps for backward of one layer: the formula of table 2, and what autograd
keeps of the traced and rewritten graph, on the meta device. Products keep the shard of what they
gather, and no gathered tensor. The graph keeps two more things: the mean and the deviation of each
LayerNorm (16 sb bytes), and, where masks are made again, a seed of 16 bytes. Masks are kept as
bytes first (rng="per-rank"), as in the paper, then not at all ("invariant").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.cost import dry_run
from graphpar.passes.apply_recompute import apply_recompute
from graphpar.pipeline import default_pipeline, run_pipeline, step
from graphpar.program import Program, annotate, copy_program, info
from graphpar.trace import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Heads ``a``, microbatch ``b``, hidden size ``h``, sequence ``s``, layers ``l``."""

    a: int
    b: int
    h: int
    l: int
    s: int = 2048
    t: int = 8


SIZES = {  # table 3
    "22b": Size(a=64, b=4, h=6144, l=48),
    "175b": Size(a=96, b=1, h=12288, l=96),
    "530b": Size(a=128, b=1, h=20480, l=105),
    "1t": Size(a=160, b=1, h=25600, l=128),
}


class Attention(nn.Module):
    """Tensors are [sequence, batch, hidden], heads are batched products."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = size.a, dropout
        self.qkv = nn.Linear(size.h, 3 * size.h)
        self.projection = nn.Linear(size.h, size.h)

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        d = h // self.heads
        q, k, v = self.qkv(x).view(s, b * self.heads, 3 * d).transpose(0, 1).chunk(3, -1)
        scores = torch.bmm(q, k.transpose(1, 2)) * d**-0.5
        weights = F.dropout(scores.softmax(-1), self.dropout)
        context = torch.bmm(weights, v).transpose(0, 1).reshape(s, b, h)
        projected: Tensor = self.projection(context)
        return projected


class Layer(nn.Module):
    def __init__(self, size: Size, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(size.h), nn.LayerNorm(size.h)
        self.attention = Attention(size, dropout)
        self.up, self.down = nn.Linear(size.h, 4 * size.h), nn.Linear(4 * size.h, size.h)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout)


class GPT(nn.Module):
    """The whole model: the loss of tokens and labels [sequence, batch]; one table for both ends."""

    def __init__(self, size: Size, dropout: float = 0.1, vocabulary: int = 51200) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, size.h)
        self.positions = nn.Parameter(torch.empty(size.s, 1, size.h))
        self.layers = nn.ModuleList(Layer(size, dropout) for _ in range(size.l))
        self.norm = nn.LayerNorm(size.h)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.tokens(tokens) + self.positions, self.dropout)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer(size: Size) -> tuple[nn.Module, tuple[Tensor]]:
    """A layer and its input on the meta device, in 16 bits."""
    with torch.device("meta"):
        module = Layer(size).bfloat16()
        x = torch.empty(size.s, size.b, size.h, dtype=torch.bfloat16, requires_grad=True)
    return module, (x,)


def gpt(size: Size) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The whole model on the meta device, in 16 bits, with one microbatch."""
    with torch.device("meta"):
        module = GPT(size).bfloat16()
        tokens, labels = torch.zeros(2, size.s, size.b, dtype=torch.long)
    return module, (tokens, labels), {}


def gpt_22b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return gpt(SIZES["22b"])


def gpt_175b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return gpt(SIZES["175b"])


def gpt_530b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return gpt(SIZES["530b"])


def gpt_1t() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return gpt(SIZES["1t"])


def model() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """One layer of the 22B model."""
    module, args = layer(SIZES["22b"])
    return module, args, {}


APPLY = step("apply-recompute")

# --- the table ----------------------------------------------------------------------------------


def rewritten(size: Size, *, tp: int, sp: bool, rng: str) -> Program:
    """The layer's program for ``tp`` ranks; masks of one byte with ``rng="per-rank"``."""
    module, args = layer(size)
    pipeline = default_pipeline(tp=tp, sp=sp, rng=rng)
    if tp == 1:
        pipeline = step("outline"), step("split-dropout"), step("seed-dropout", rng=rng)
    return list(run_pipeline(trace(module, args, {}), pipeline).values())[-1]


def again(program: Program, *names: str) -> Program:
    """The program in which backward runs the ops of these names again."""
    return apply_recompute(marked(program, *names))


def marked(program: Program, *names: str) -> Program:
    """The program with the ops of these names marked, for apply-recompute."""
    copy = copy_program(program)
    found = set()
    for _, graph in copy.graphs():
        for node in graph.nodes:
            if node.op == "call_function" and name_of(node) in names:
                annotate(node, replay=True)
                found.add(name_of(node))
    if found != set(names):
        raise ValueError(f"the layer has no {', '.join(set(names) - found)}")
    return copy


def name_of(node: torch.fx.Node) -> str:
    """An op's name; in the core of attention with the name of the module."""
    target: Any = node.target
    op = target._schema.name.split("::")[1] if hasattr(target, "_schema") else str(target)
    inside = info(node).source.module.endswith("attention")
    return f"attention.{op}" if inside else op


CORE = "attention.bmm", "attention.mul", "attention.softmax"


def core(rng: str) -> tuple[str, ...]:
    """What the paper's selective recomputation runs again: q k, softmax, dropout; it stops before
    the product with v."""
    dropout = "rank_dropout" if rng == "per-rank" else "seeded_dropout"
    return (*CORE, f"attention.{dropout}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    formula: Callable[[Size, bool], float]
    sp: bool = False
    tp: bool = True
    replay: str = ""


def _terms(size: Size, masks: bool) -> tuple[float, float, float]:
    """(sbh, the 34 that is 32 without masks, the 5as/h that is 4as/h)."""
    attention = size.a * size.s / size.h
    return size.s * size.b * size.h, 34 if masks else 32, (5 if masks else 4) * attention


def _none(size: Size, masks: bool) -> float:
    sbh, linear, attention = _terms(size, masks)
    return sbh * (linear + attention)


def _tp(size: Size, masks: bool) -> float:
    sbh, linear, attention = _terms(size, masks)
    return sbh * (linear - 24 + 24 / size.t + attention / size.t)


ROWS = (
    Row(name="no parallelism", formula=_none, tp=False),
    Row(name="tensor parallel", formula=_tp),
    Row(
        name="tensor + sequence parallel",
        formula=lambda size, masks: _none(size, masks) / size.t,
        sp=True,
    ),
    Row(
        name="tensor parallel, selective",
        formula=lambda size, masks: _tp(size, masks) - _terms(size, masks)[2] * _sbh(size) / size.t,
        replay="core",
    ),
    Row(
        name="tensor + sequence parallel, selective",
        formula=lambda size, masks: _terms(size, masks)[1] * _sbh(size) / size.t,
        sp=True,
        replay="core",
    ),
    Row(name="full recomputation", formula=lambda size, masks: 2 * _sbh(size), replay="full"),
)


def _sbh(size: Size) -> int:
    return size.s * size.b * size.h


def saved_bytes(size: Size, row: Row, *, rng: str) -> int:
    """What autograd keeps on one device, of the layer's own graph."""
    program = rewritten(size, tp=size.t if row.tp else 1, sp=row.sp, rng=rng)
    if row.replay == "full":
        chosen = run_pipeline(program, (step("choose-recompute", mode="full"), APPLY))
        program = list(chosen.values())[-1]
    elif row.replay:
        program = again(program, *core(rng))
    return dry_run(program).saved_bytes


def main(name: str) -> None:
    size = SIZES[name]
    print(f"{name}: bytes per layer and device, t = {size.t}; formula (paper) and graph")
    for row in ROWS:
        cells = [f"{row.name:<38}"]
        for masks, rng in ((True, "per-rank"), (False, "invariant")):
            cells.append(f"{row.formula(size, masks):>18,.0f}")
            cells.append(f"{saved_bytes(size, row, rng=rng):>18,}")
        print(*cells)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["22b"])
