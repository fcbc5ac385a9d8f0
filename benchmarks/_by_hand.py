"""A Llama cut by hand: local shards, plain tensors, and the collectives that graphpar writes.

The floor of a step: what is left when nothing is done but the products, the elementwise ops and
the collectives. Over t ranks: queries, keys, values, gate, up and the head by rows, the two
projections back by columns; norms and the table of tokens whole. Tensors are [b, s / t, h]
between products, [b, s, · / t] within them. Either autograd keeps what is gathered for products,
or its shard, which backward gathers again beside them (Korthikanti et al. 2022, section 4.2.2), as
graphpar does with ``overlap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def start_gather(x: Tensor) -> Callable[[], Tensor]:
    """[b, s / t, h] of each rank → [b, s, h], once it is waited for."""
    ranks = dist.get_world_size()
    rows = x.new_empty(ranks * x.size(0), *x.shape[1:])
    work = dist.all_gather_single(rows, x.contiguous(), async_op=True)

    def finish() -> Tensor:
        work.wait()
        parts = rows.unflatten(0, (ranks, -1))
        return parts.transpose(0, 1).reshape(x.size(0), -1, x.size(2))

    return finish


def start_scatter(x: Tensor) -> Callable[[], Tensor]:
    """[b, s, h] of each rank → their sum's [b, s / t, h]. Gloo has no reduce-scatter."""
    parts = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return received.sum(0)

    return finish


def gathered(x: Tensor) -> Tensor:
    return start_gather(x)()


def scattered(x: Tensor) -> Tensor:
    return start_scatter(x)()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return scattered(grads[0])


class GatherAgain(torch.autograd.Function):
    """Products of what is gathered, of which autograd keeps the shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        whole = gathered(x)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        again = start_gather(x)
        rows = [grad.flatten(0, 1) for grad in grads]
        total = rows[0].mm(weights[0])
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        of_x = start_scatter(total.view(*grads[0].shape[:2], -1))
        whole = again().flatten(0, 1)
        of_weights = [grad.t().mm(whole) for grad in rows]
        return of_x(), *of_weights


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return gathered(grads[0])


class Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return gathered(grads[0])


class Shared(torch.autograd.Function):
    """Norm weights, used with each rank's tokens: one sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat(grads)
        dist.all_reduce(flat)
        return flat.split([g.numel() for g in grads])


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class ByHand(nn.Module):
    """``forward(input_ids, labels)`` gives the loss. ``keep``: autograd keeps what is gathered."""

    def __init__(self, model: PreTrainedModel, *, keep: bool = False) -> None:
        super().__init__()
        self.keep = keep
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        config = model.config
        self.heads, self.layers = config.num_attention_heads // ranks, config.num_hidden_layers
        self.groups = config.num_key_value_heads // ranks
        self.epsilon, self.vocabulary = config.rms_norm_eps, config.vocab_size // ranks
        self.width = config.hidden_size // config.num_attention_heads
        self.cuts: dict[str, int] = {}
        self.parts: dict[str, nn.Parameter] = {}
        for name, value in model.named_parameters():
            kind = name.split(".")[-2]
            if kind in ROWS or kind in COLUMNS:
                self.cuts[name] = int(kind in COLUMNS)
                value = value.chunk(ranks, self.cuts[name])[self.rank]
            self.parts[name] = nn.Parameter(value.detach().clone())
            self.register_parameter(name.replace(".", "_"), self.parts[name])
        positions = torch.arange(config.max_position_embeddings)
        hidden = torch.empty(1, dtype=torch.float32)
        self.rotary = model.model.rotary_emb, hidden, positions

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients, by the original's names."""
        found = {}
        for name, part in self.parts.items():
            assert part.grad is not None, name
            found[name] = part.grad
            if name in self.cuts:
                all_parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
                dist.all_gather(all_parts, part.grad.contiguous())
                found[name] = torch.cat(all_parts, self.cuts[name])
        return found

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        rotary, like, positions = self.rotary
        cos, sin = rotary(like, positions[None, : input_ids.size(1)])
        x = Slice.apply(F.embedding(input_ids, self.parts["model.embed_tokens.weight"]))
        for i in range(self.layers):
            x = self.layer(f"model.layers.{i}", x, cos[:, None], sin[:, None])
        y = self.norm(x, *Shared.apply(self.parts["model.norm.weight"]))
        (logits,) = self.products(y, self.parts["lm_head.weight"])
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        return self.cross_entropy(logits.flatten(0, 1), targets)

    def products(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        if not self.keep:
            return GatherAgain.apply(x, *weights)
        whole = Gather.apply(x)
        return tuple(F.linear(whole, weight) for weight in weights)

    def layer(self, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def weight(part: str) -> Tensor:
            return self.parts[f"{name}.{part}.weight"]

        first, second = Shared.apply(weight("input_layernorm"), weight("post_attention_layernorm"))
        projections = (weight(f"self_attn.{p}_proj") for p in "qkv")
        q, k, v = (
            y.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for y in self.products(self.norm(x, first), *projections)
        )
        q, k = (z * cos + _half_turned(z) * sin for z in (q, k))
        repeats = self.heads // self.groups
        k, v = (z.repeat_interleave(repeats, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + Scatter.apply(F.linear(y, weight("self_attn.o_proj")))
        gate, up = self.products(
            self.norm(x, second), weight("mlp.gate_proj"), weight("mlp.up_proj")
        )
        return x + Scatter.apply(F.linear(F.silu(gate) * up, weight("mlp.down_proj")))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Over a sharded vocabulary (Shoeybi et al. 2019, section 3)."""
        top = logits.detach().amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        own = targets - self.rank * self.vocabulary
        mine = (own >= 0) & (own < self.vocabulary)
        picked = logits[torch.arange(len(own)), own.where(mine, 0)] * mine
        total, found = Sum.apply(torch.stack([logits.exp().sum(1), picked])).unbind()
        kept = targets != -100
        return ((total.log() - found) * kept).sum() / kept.sum()


def _half_turned(x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)
