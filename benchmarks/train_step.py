"""Training step of a small Llama on two gloo ranks: graphpar against a plan for DTensor.

    python benchmarks/train_step.py

A step is forward, backward and AdamW. The peer is the same model of transformers under
``parallelize_module`` with a hand-written plan of tensor and sequence parallelism, once with the
logits gathered for the loss and once with ``loss_parallel``; the ratio is that of the faster of
the two. All variants run interleaved, in changing order, in the same processes, one thread each;
before that, loss and gradients of each are compared with the single process. "single" is the
unmodified model, which both ranks run at once. "by hand" is the floor: the same collectives around
local shards, without any framework.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _by_hand import ByHand
from _common import report, table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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

RANKS = 2
TOLERANCE = 1e-4


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


SIZES = {
    "small": Size(256, 704, 4, 8, 2048, 4, 128, 40, 1.3),
    "larger": Size(1024, 2816, 2, 16, 4096, 2, 256, 15, 1.0),
    "deep": Size(128, 352, 24, 4, 512, 2, 64, 20, 1.3),
}


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
    """A model with its optimizer and what a step of it is."""

    def __init__(
        self,
        model: nn.Module,
        call: Mapping[str, Any],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.model, self.call, self.context = model, call, context
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def loss(self) -> Tensor:
        """The loss of the call, after its backward."""
        with self.context():
            loss: Tensor = self.model(**self.call).loss
            loss.backward()
        return loss

    def step(self) -> None:
        """One step between two barriers; its seconds, and this process's seconds of CPU."""
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self.loss()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)

    def check(self, reference: Variant) -> None:
        """Loss and all gradients are the reference's."""
        ours, theirs = _whole(self.loss().detach()), reference.loss().detach()
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=0)
        found = _gradients(self.model)
        for name, wanted in _gradients(reference.model).items():
            error = (found[name] - wanted).norm() / wanted.norm()
            assert error < TOLERANCE, f"{name}: gradient differs by {error:.1e}"
        self.optimizer.zero_grad()
        reference.optimizer.zero_grad()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, ByHand):
        return model.gradients()
    return {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def variants(size: Size, mesh: DeviceMesh) -> dict[str, Variant]:
    model = size.build()
    tokens = torch.randint(size.vocab, (size.batch, size.sequence))
    call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    # The embedding's output is a part of the sequence: positions cannot be read off it.
    peer_call = {**call, "position_ids": torch.arange(size.sequence)[None]}

    def peer(*, gather: bool) -> nn.Module:
        own = copy.deepcopy(model)
        return parallelize_module(own, mesh, plan(size.layers, gather=gather))

    return {
        "single": Variant(copy.deepcopy(model), call),
        "graphpar": Variant(graphpar.transform(model, (), call, tp=RANKS, sp=True), call),
        "by hand": Variant(ByHand(model), call),
        "DTensor, gathered logits": Variant(peer(gather=True), peer_call),
        "DTensor, loss_parallel": Variant(peer(gather=False), peer_call, loss_parallel),
    }


def worker(rank: int, store: str, names: list[str], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for name in names:
        size = SIZES[name]
        runs = variants(size, mesh)
        for variant in runs.values():
            variant.check(runs["single"])
        order, shuffle = list(runs.values()), random.Random(0).shuffle  # the same on each rank
        for _ in range(size.steps + 2):
            shuffle(order)
            for variant in order:
                variant.step()
        if rank == 0:
            results[name] = {k: (v.seconds[2:], v.cpu_seconds[2:]) for k, v in runs.items()}
    dist.destroy_process_group()


# --- the report ---------------------------------------------------------------------------------


def measure(names: list[str]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Seconds and CPU seconds of each step, by size and variant."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(worker, (str(Path(folder, "store")), names, results), nprocs=RANKS)
        return dict(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES], action="append", help="default: all")
    names = parser.parse_args().size or [*SIZES]
    parts = []
    for name, steps in measure(names).items():
        size = SIZES[name]
        median = {k: 1000 * statistics.median(v) for k, (v, _) in steps.items()}
        cpu = {k: 1000 * statistics.median(v) for k, (_, v) in steps.items()}
        peers = [k for k in median if k.startswith("DTensor")]
        ratio = min(median[k] for k in peers) / median["graphpar"]
        words = ", ".join(f"{k} {v}" for k, v in asdict(size).items() if k != "target")
        rows = [
            [
                k,
                f"{median[k]:.1f}",
                f"{median[k] / median['graphpar']:.2f}",
                f"{cpu[k]:.1f}",
                f"{cpu[k] / cpu['graphpar']:.2f}",
            ]
            for k in steps
        ]
        head = ["step", "median ms", "of graphpar", "CPU ms of a rank", "of graphpar"]
        parts.append(
            f"## {name.capitalize()}: {words}\n\n"
            + table(head, rows)
            + f"\n\nThe faster peer / graphpar: **{ratio:.2f}** (target {size.target})."
        )
    report(
        "train_step",
        "Training step of a small Llama on two gloo ranks",
        "float32, tp=2, sp=True, one thread a rank, forward + backward + AdamW; loss and "
        f"gradients of each equal the single process's to {TOLERANCE}.\n\n" + "\n\n".join(parts),
    )


if __name__ == "__main__":
    main()
