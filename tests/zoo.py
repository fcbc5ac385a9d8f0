"""Small models of many kinds, each with a call whose outputs hold a loss.

``build(name, layers=2, dropout=0.1)`` gives ``(module, kwargs)``; ``loss_of(output)`` its loss.
Every size is small: width 64, sequence 16, vocabulary 96, batch 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, VOCAB, WIDTH, INNER = 2, 16, 96, 64, 96
Case = tuple[nn.Module, dict[str, Any]]


def _tokens(length: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, length))


def _language_model(module: nn.Module) -> Case:
    tokens = _tokens()
    return module, {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}


def _special_tokens() -> dict[str, int]:
    return {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


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
        **_special_tokens(),
    )
    return _language_model(GPT2LMHeadModel(config))


def _llama_like(layers: int, dropout: float, **extra: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "attention_dropout": dropout,
        **_special_tokens(),
        **extra,
    }


def llama(layers: int, dropout: float) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _language_model(LlamaForCausalLM(LlamaConfig(**_llama_like(layers, dropout))))


def qwen3(layers: int, dropout: float) -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_llama_like(layers, dropout, head_dim=8))
    return _language_model(Qwen3ForCausalLM(config))


def gemma2(layers: int, dropout: float) -> Case:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_llama_like(layers, dropout, head_dim=8, sliding_window=8))
    return _language_model(Gemma2ForCausalLM(config))


def mixtral(layers: int, dropout: float) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_llama_like(layers, dropout, num_local_experts=4))
    config._experts_implementation = "batched_mm"
    return _language_model(MixtralForCausalLM(config))


def bert(layers: int, dropout: float) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **_special_tokens(),
    )
    tokens = _tokens()
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens.clone()}


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
        **_special_tokens(),
    )
    kwargs = {"input_ids": _tokens(), "labels": _tokens(SEQ // 2), "use_cache": False}
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
        **_special_tokens(),
    )
    kwargs = {
        "input_features": torch.randn(BATCH, 8, 2 * SEQ),
        "labels": _tokens(SEQ // 2),
        "use_cache": False,
    }
    return WhisperForConditionalGeneration(config), kwargs


class _Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(SEQ, SEQ).tril().view(1, 1, SEQ, SEQ))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q = q.view(b, t, 4, c // 4).transpose(1, 2)
        k = k.view(b, t, 4, c // 4).transpose(1, 2)
        v = v.view(b, t, 4, c // 4).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (c // 4) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = _Attention(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """GPT as in nanoGPT: packed projection, masked softmax by hand, tied head."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], dtype=torch.long, device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)
        return logits, loss


def nanogpt(layers: int, dropout: float) -> Case:
    tokens = _tokens()
    return NanoGPT(layers, dropout), {"idx": tokens, "targets": tokens.clone()}


class EncoderClassifier(nn.Module):
    """``nn.TransformerEncoder`` with a mean-pooled head."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.encoder(x).mean(1))
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}


def encoder(layers: int, dropout: float) -> Case:
    kwargs = {"x": torch.randn(BATCH, SEQ, WIDTH), "y": torch.tensor([0, 3])}
    return EncoderClassifier(layers, dropout), kwargs


class LSTMClassifier(nn.Module):
    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.lstm = nn.LSTM(
            32, WIDTH, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits = self.head(hidden[:, -1])
        return F.cross_entropy(logits, y), logits


def lstm(layers: int, dropout: float) -> Case:
    return LSTMClassifier(layers, dropout), {"tokens": _tokens(), "y": torch.tensor([0, 3])}


BUILDERS: dict[str, Callable[[int, float], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "nanogpt": nanogpt,
    "encoder": encoder,
    "lstm": lstm,
}


def build(name: str, *, layers: int = 2, dropout: float = 0.1, seed: int = 0) -> Case:
    """A model in train mode and the keyword arguments of one call."""
    torch.manual_seed(seed)
    module, kwargs = BUILDERS[name](layers, dropout)
    return module.train(), kwargs


def loss_of(output: Any) -> Tensor:
    """The loss among a model's outputs: its one floating scalar."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return next(
        x for x in leaves if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()
    )
