"""More transformers models from tiny random configs."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.zoo.common import (
    BATCH,
    INNER,
    SEQ,
    VOCAB,
    WIDTH,
    Case,
    language_model,
    special_tokens,
    tokens,
)
from tests.zoo.transformers_models import llama_like, usual


def _causal(name: str, **config: Any) -> Case:
    """``NameForCausalLM`` of a ``NameConfig``."""
    made = getattr(transformers, f"{name}Config")(**config)
    return language_model(getattr(transformers, f"{name}ForCausalLM")(made))


def _masked(name: str, **config: Any) -> Case:
    made = getattr(transformers, f"{name}Config")(**config)
    ids = tokens()
    return getattr(transformers, f"{name}ForMaskedLM")(made), {
        "input_ids": ids,
        "labels": ids.clone(),
    }


def _experts(layers: int, dropout: float, **extra: Any) -> dict[str, Any]:
    return llama_like(
        layers,
        dropout,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        experts_implementation="batched_mm",
        **extra,
    )


def gptj(layers: int, dropout: float) -> Case:
    return _causal(
        "GPTJ",
        n_layer=layers,
        n_embd=WIDTH,
        n_head=8,
        rotary_dim=4,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **special_tokens(),
    )


def gpt_neox(layers: int, dropout: float) -> Case:
    return _causal("GPTNeoX", **usual(layers, attention_dropout=dropout, hidden_dropout=dropout))


def opt(layers: int, dropout: float) -> Case:
    sizes = {"ffn_dim": INNER, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 32}
    return _causal("OPT", **usual(layers, dropout=dropout, **sizes))


def bloom(layers: int, dropout: float) -> Case:
    return _causal("Bloom", n_layer=layers, hidden_size=WIDTH, n_head=8, **special_tokens())


def falcon(layers: int, dropout: float) -> Case:
    return _causal("Falcon", **usual(layers, multi_query=True, parallel_attn=True))


def falcon_grouped(layers: int, dropout: float) -> Case:
    return _causal("Falcon", **usual(layers, num_kv_heads=4, new_decoder_architecture=True))


def mistral(layers: int, dropout: float) -> Case:
    return _causal("Mistral", **llama_like(layers, dropout, sliding_window=8))


def qwen2(layers: int, dropout: float) -> Case:
    return _causal("Qwen2", **llama_like(layers, dropout))


def mixtral_grouped(layers: int, dropout: float) -> Case:
    """The default implementation of experts: rows sorted by expert."""
    return _causal("Mixtral", **llama_like(layers, dropout, num_local_experts=4))


def qwen2_moe(layers: int, dropout: float) -> Case:
    shared = {"shared_expert_intermediate_size": WIDTH}
    return _causal("Qwen2Moe", **_experts(layers, dropout, **shared))


def qwen3_moe(layers: int, dropout: float) -> Case:
    return _causal("Qwen3Moe", **_experts(layers, dropout, head_dim=8))


def gpt_oss(layers: int, dropout: float) -> Case:
    """Gates and values of experts take turns along one axis; sinks beside the scores."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 8}
    experts = {"experts_implementation": "batched_mm"}
    return _causal("GptOss", **llama_like(layers, dropout, **sizes, **experts))


def deepseek_v3(layers: int, dropout: float) -> Case:
    """Keys and values from a narrow latent; a dense layer, then experts in groups."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    heads = {"num_key_value_heads": 8, "v_head_dim": 8}
    sizes = {**_experts(layers, dropout), **heads, **latent, **groups}
    return _causal("DeepseekV3", **sizes)


def phi(layers: int, dropout: float) -> Case:
    return _causal("Phi", **usual(layers, resid_pdrop=dropout))


def phi3(layers: int, dropout: float) -> Case:
    return _causal("Phi3", **llama_like(layers, dropout))


def gemma(layers: int, dropout: float) -> Case:
    return _causal("Gemma", **llama_like(layers, dropout, head_dim=8))


def olmo2(layers: int, dropout: float) -> Case:
    return _causal("Olmo2", **llama_like(layers, dropout))


def roberta(layers: int, dropout: float) -> Case:
    return _masked("Roberta", **usual(layers, hidden_dropout_prob=dropout))


def albert(layers: int, dropout: float) -> Case:
    return _masked("Albert", **usual(layers, embedding_size=32, hidden_dropout_prob=dropout))


def deberta(layers: int, dropout: float) -> Case:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    return _masked("Deberta", **usual(layers, hidden_dropout_prob=dropout, **relative))


def bart(layers: int, dropout: float) -> Case:
    config = transformers.BartConfig(
        d_model=WIDTH,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_position_embeddings=32,
        dropout=dropout,
        **special_tokens(),
    )
    return language_model(transformers.BartForConditionalGeneration(config))


def clip(layers: int, dropout: float) -> Case:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "attention_dropout": dropout}
    config = transformers.CLIPConfig(
        text_config={**sizes, **heads, "max_position_embeddings": SEQ, **special_tokens()},
        vision_config={**sizes, **heads, "image_size": 16, "patch_size": 8},
        projection_dim=32,
    )
    images = torch.randn(BATCH, 3, 16, 16)
    kwargs = {"input_ids": tokens(), "pixel_values": images, "return_loss": True}
    return transformers.CLIPModel(config), kwargs


def mamba(layers: int, dropout: float) -> Case:
    return _causal(
        "Mamba", hidden_size=WIDTH, num_hidden_layers=layers, state_size=8, **special_tokens()
    )


def mamba2(layers: int, dropout: float) -> Case:
    sizes = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8}
    return _causal(
        "Mamba2", hidden_size=WIDTH, num_hidden_layers=layers, **sizes, **special_tokens()
    )


def gpt2_odd(layers: int, dropout: float) -> Case:
    """Five heads, and a vocabulary of 97."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=40,
        n_head=5,
        n_positions=32,
        resid_pdrop=dropout,
        **{**special_tokens(), "vocab_size": VOCAB + 1},
    )
    return language_model(transformers.GPT2LMHeadModel(config))
