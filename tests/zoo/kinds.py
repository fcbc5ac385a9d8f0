"""Tiny models of kinds that are hard to split, one for each, with the inputs of one call.

``build(name)`` gives ``(module, args)``, in the default dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo import kinds_attention as attention
from tests.zoo import kinds_layers as layers
from tests.zoo import kinds_sequence as sequence
from tests.zoo.kinds_attention import BATCH, SEQ, WIDTH

Kind = tuple[nn.Module, tuple[Tensor, ...]]
Input = Callable[[], Tensor]


def normal(*shape: int) -> Input:
    return lambda: torch.randn(shape, requires_grad=True)


def below(limit: int, *shape: int) -> Input:
    return lambda: torch.randint(0, limit, shape)


def padding() -> Tensor:
    """(batch, sequence), true but for the last third of the last row."""
    mask = torch.ones(BATCH, SEQ, dtype=torch.bool)
    mask[-1, -2:] = False
    return mask


ROWS = normal(BATCH, SEQ, WIDTH)


def kind(module: Callable[[], nn.Module], *inputs: Input) -> Callable[[], Kind]:
    """A builder; without ``inputs`` the module takes (batch, sequence, width)."""
    return lambda: (module(), tuple(make() for make in inputs or (ROWS,)))


KINDS: dict[str, Callable[[], Kind]] = {
    "alibi_buffer": kind(attention.AlibiBuffer),
    "alibi_inside": kind(attention.AlibiInside),
    "relative_embedding": kind(attention.RelativeEmbedding),
    "swin_window": kind(attention.SwinWindow, normal(BATCH, 9, WIDTH)),
    "neox_packed": kind(attention.NeoxPacked),
    "falcon_packed": kind(attention.FalconPacked),
    "grouped_query": kind(attention.GroupedQuery),
    "multi_query": kind(attention.MultiQuery),
    "kv_cache": kind(attention.KVCache),
    "normed_heads": kind(attention.NormedHeads),
    "cross_attention": kind(attention.CrossAttention, ROWS, normal(BATCH, 9, WIDTH)),
    "padding_mask": kind(attention.PaddingMask, ROWS, padding),
    "linear_attention": kind(attention.LinearAttention),
    "shared_relative_bias": kind(attention.SharedRelativeBias),
    "rotary_by_position": kind(attention.RotaryByPosition, ROWS, below(10, BATCH, SEQ)),
    "conv_net": kind(layers.ConvNet, normal(BATCH, 3, 12, 12)),
    "res_net": kind(layers.ResNet, normal(BATCH, 3, 8, 8)),
    "diffusion_block": kind(layers.DiffusionBlock, normal(BATCH, 8, 6, 6), normal(BATCH, WIDTH)),
    "bags": kind(layers.Bags, normal(BATCH, WIDTH), below(12, BATCH, 3, 5)),
    "dense_experts": kind(layers.DenseExperts),
    "top_experts": kind(layers.TopExperts),
    "turns_in_gate": kind(layers.TurnsInGate),
    "low_rank": kind(layers.LowRank),
    "tied": kind(layers.Tied),
    "transposed_weight": kind(layers.TransposedWeight),
    "gated_norm": kind(layers.GatedNorm),
    "inplace": kind(layers.Inplace),
    "uneven_split": kind(layers.UnevenSplit),
    "channel_shuffle": kind(layers.ChannelShuffle),
    "patch_merging": kind(layers.PatchMerging, normal(BATCH, 16, WIDTH)),
    "sequence_batch_norm": kind(layers.SequenceBatchNorm),
    "normed_weight": kind(layers.NormedWeight),
    "many_losses": kind(layers.ManyLosses, ROWS, ROWS),
    "running_ops": kind(sequence.RunningOps),
    "mamba": kind(sequence.Mamba),
    "gru_loop": kind(sequence.GRULoop),
    "bidirectional_lstm": kind(sequence.BidirectionalLSTM),
    "pooled_encoder": kind(sequence.PooledEncoder, below(12, BATCH, SEQ)),
    "torch_attention": kind(sequence.TorchAttention),
    "torch_decoder": kind(sequence.TorchDecoder, ROWS, normal(BATCH, 5, WIDTH)),
}


def build(name: str, *, seed: int = 0) -> Kind:
    """A module in train mode and its arguments, of which the floating ones require a gradient."""
    torch.manual_seed(seed)
    return KINDS[name]()
