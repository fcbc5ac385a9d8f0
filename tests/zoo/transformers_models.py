"""Transformers models of many kinds, from tiny random configs."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.common import (
    BATCH,
    INNER,
    SEQ,
    WIDTH,
    Case,
    language_model,
    special_tokens,
    tokens,
)


def gpt2(layers: int, dropout: float) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=WIDTH,
        n_head=4,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        loss_type="ForCausalLM",
        **special_tokens(),
    )
    return language_model(GPT2LMHeadModel(config))


def usual(layers: int, **extra: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 8,
        **special_tokens(),
        **extra,
    }


def llama_like(layers: int, dropout: float, **extra: Any) -> dict[str, Any]:
    return usual(layers, num_key_value_heads=4, attention_dropout=dropout, **extra)


def llama(layers: int, dropout: float) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return language_model(LlamaForCausalLM(LlamaConfig(**llama_like(layers, dropout))))


def qwen3(layers: int, dropout: float) -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**llama_like(layers, dropout, head_dim=8))
    return language_model(Qwen3ForCausalLM(config))


def gemma2(layers: int, dropout: float) -> Case:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**llama_like(layers, dropout, head_dim=8, sliding_window=8))
    return language_model(Gemma2ForCausalLM(config))


def mixtral(layers: int, dropout: float) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**llama_like(layers, dropout, num_local_experts=4))
    config._experts_implementation = "batched_mm"
    return language_model(MixtralForCausalLM(config))


def bert(layers: int, dropout: float) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **special_tokens(),
    )
    ids = tokens()
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def t5(layers: int, dropout: float) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers,
        d_model=WIDTH,
        d_ff=INNER,
        num_heads=4,
        d_kv=16,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        **special_tokens(),
    )
    kwargs = {"input_ids": tokens(), "labels": tokens(SEQ // 2), "use_cache": False}
    return T5ForConditionalGeneration(config), kwargs


def vit(layers: int, dropout: float) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    kwargs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return ViTForImageClassification(config), kwargs


def whisper(layers: int, dropout: float) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=WIDTH,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_source_positions=SEQ,
        max_target_positions=32,
        num_mel_bins=8,
        decoder_start_token_id=1,
        dropout=dropout,
        **special_tokens(),
    )
    kwargs = {
        "input_features": torch.randn(BATCH, 8, 2 * SEQ),
        "labels": tokens(SEQ // 2),
        "use_cache": False,
    }
    return WhisperForConditionalGeneration(config), kwargs
