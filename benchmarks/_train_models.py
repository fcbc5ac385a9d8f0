"""The models of train_step: a Llama as it is, by DTensor, by hand and by graphpar."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _by_hand import ByHand
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import graphpar

TOLERANCE = 1e-4
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "AdamW": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""AdamW as it is by default, which on a CPU is a loop over the parameters, and its two others."""


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    ffn: int
    layers: int
    heads: int
    vocab: int
    batch: int
    sequence: int
    steps: int
    target: float

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=self.hidden,
                intermediate_size=self.ffn,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads // 2,
                vocab_size=self.vocab,
            )
        ).train()

    def call(self) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab, (self.batch, self.sequence), generator=numbers)
        return {"input_ids": tokens, "labels": tokens}


SIZES = {
    "small": Size(256, 704, 4, 8, 2048, 4, 128, 40, 1.8),
    "large": Size(1024, 2816, 2, 16, 4096, 2, 256, 15, 1.15),
    "deep": Size(128, 352, 48, 8, 512, 2, 64, 15, 1.8),
}


class Loss(nn.Module):
    """The loss alone: a program that returns the logits too would have to gather them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        found: Tensor = self.model(input_ids, labels=labels, use_cache=False, **positions).loss
        return found


# --- the peer -----------------------------------------------------------------------------------


def plan(layers: int, *, gather: bool) -> dict[str, ParallelStyle]:
    """Tensor parallelism with sequence parallelism, as torch's tutorial has it for Llama."""
    if gather:
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    else:
        head = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": head,
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        styles |= {
            f"{layer}.input_layernorm": SequenceParallel(),
            f"{layer}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            f"{layer}.self_attn.q_proj": ColwiseParallel(),
            f"{layer}.self_attn.k_proj": ColwiseParallel(),
            f"{layer}.self_attn.v_proj": ColwiseParallel(),
            f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{layer}.post_attention_layernorm": SequenceParallel(),
            f"{layer}.mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            f"{layer}.mlp.gate_proj": ColwiseParallel(),
            f"{layer}.mlp.up_proj": ColwiseParallel(),
            f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    return styles


# --- a variant ----------------------------------------------------------------------------------


class Variant:
    """A module that gives the loss, its optimizers and what a step of it costs."""

    def __init__(
        self,
        model: nn.Module,
        call: Mapping[str, Any],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        optimizers: Mapping[str, dict[str, bool]] = OPTIMIZERS,
    ) -> None:
        self.model, self.call, self.context = model, call, context
        parameters = list(model.parameters())
        self.optimizers = {
            name: torch.optim.AdamW(parameters, lr=1e-6, **options)
            for name, options in optimizers.items()
        }
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu_seconds: dict[str, list[float]] = defaultdict(list)

    def backward(self) -> Tensor:
        """The loss of the call, after its backward."""
        with self.context():
            loss: Tensor = self.model(**self.call)
            loss.backward()
        return loss

    def step(self, barrier: Callable[[], object] = dist.barrier) -> None:
        """A step by each optimizer from the same gradients; the seconds of each part, and those of
        CPU time of this thread, which waits for the others in none of them."""
        barrier()
        self._timed("backward", lambda: (self.backward(), barrier()))
        for name, optimizer in self.optimizers.items():
            self._timed(name, optimizer.step)
        self.model.zero_grad()

    def _timed(self, name: str, run: Callable[[], object]) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        run()
        self.seconds[name].append(time.perf_counter() - start)
        self.cpu_seconds[name].append(time.thread_time() - cpu)

    def check(self, reference: Variant) -> None:
        """Loss and all gradients are the reference's."""
        ours, theirs = _whole(self.backward().detach()), reference.backward().detach()
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=0)
        found = _gradients(self.model)
        for name, wanted in _gradients(reference.model).items():
            error = (found[name] - wanted).norm() / wanted.norm()
            assert error < TOLERANCE, f"{name}: gradient differs by {error:.1e}"
        self.model.zero_grad()
        reference.model.zero_grad()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, ByHand):
        return model.gradients()
    found = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("_orig_mod.").removeprefix("model."): g for name, g in found.items()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


ONE, OURS, FLOOR = "one process", "graphpar", "by hand"
KEEPS, FLOOR_KEEPS = "graphpar, overlap=False", "by hand, keeps what it gathers"
PEERS = {"DTensor, gathered logits": True, "DTensor, loss_parallel": False}


def variants(size: Size, mesh: DeviceMesh) -> dict[str, Variant]:
    model, call, tp = size.build(), size.call(), mesh.size()

    def ours(*, overlap: bool) -> Variant:
        made = graphpar.transform(Loss(model), (), call, tp=tp, sp=True, overlap=overlap)
        return Variant(made, call)

    return {
        ONE: Variant(Loss(copy.deepcopy(model)), call),
        OURS: ours(overlap=True),
        FLOOR: Variant(ByHand(model), call),
        KEEPS: ours(overlap=False),
        FLOOR_KEEPS: Variant(ByHand(model, keep=True), call),
        **{name: peer(size, mesh, gather=gather) for name, gather in PEERS.items()},
    }


def peer(size: Size, mesh: DeviceMesh, *, gather: bool) -> Variant:
    """The embedding's output is a part of the sequence: positions cannot be read off it."""
    call = {**size.call(), "position_ids": torch.arange(size.sequence)[None]}
    model = parallelize_module(size.build(), mesh, plan(size.layers, gather=gather))
    return Variant(Loss(model), call, contextlib.nullcontext if gather else loss_parallel)
