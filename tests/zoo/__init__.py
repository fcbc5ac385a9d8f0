"""Small models of many kinds, each with a call whose outputs hold a loss.

``build(name, layers=2, dropout=0.1)`` gives ``(module, kwargs)``; ``loss_of(output)`` its loss.
Every size is small: width 64, sequence 16, vocabulary 96, batch 2; :mod:`tests.zoo.odd` has others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.zoo import more_transformers as more
from tests.zoo import odd, own
from tests.zoo import transformers_models as hf
from tests.zoo.common import BATCH, INNER, SEQ, VOCAB, WIDTH, Case

__all__ = [
    "BATCH",
    "BUILDERS",
    "FLOAT32_ONLY",
    "INNER",
    "MORE",
    "SEQ",
    "VOCAB",
    "WIDTH",
    "Case",
    "build",
    "build_double",
    "loss_of",
]

BUILDERS: dict[str, Callable[[int, float], Case]] = {
    "gpt2": hf.gpt2,
    "llama": hf.llama,
    "qwen3": hf.qwen3,
    "gemma2": hf.gemma2,
    "mixtral": hf.mixtral,
    "bert": hf.bert,
    "t5": hf.t5,
    "vit": hf.vit,
    "whisper": hf.whisper,
    "nanogpt": own.nanogpt,
    "encoder": own.encoder,
    "lstm": own.lstm,
}

"""What every stage is tested on."""

MORE: dict[str, Callable[[int, float], Case]] = {
    "gptj": more.gptj,
    "gpt_neox": more.gpt_neox,
    "opt": more.opt,
    "bloom": more.bloom,
    "falcon": more.falcon,
    "falcon_grouped": more.falcon_grouped,
    "mistral": more.mistral,
    "qwen2": more.qwen2,
    "qwen2_moe": more.qwen2_moe,
    "qwen3_moe": more.qwen3_moe,
    "gpt_oss": more.gpt_oss,
    "deepseek_v3": more.deepseek_v3,
    "mixtral_grouped": more.mixtral_grouped,
    "phi": more.phi,
    "phi3": more.phi3,
    "gemma": more.gemma,
    "olmo2": more.olmo2,
    "roberta": more.roberta,
    "albert": more.albert,
    "deberta": more.deberta,
    "bart": more.bart,
    "clip": more.clip,
    "mamba": more.mamba,
    "mamba2": more.mamba2,
    "gpt2_odd": more.gpt2_odd,
    "odd": odd.odd,
}
"""What the rewriting is tested on, besides; the last two have sizes that nothing divides."""

FLOAT32_ONLY = {"mixtral_grouped"}
"""Its grouped products have no kernel for float64."""


def build(name: str, *, layers: int = 2, dropout: float = 0.1, seed: int = 0) -> Case:
    """A model in train mode and the keyword arguments of one call."""
    torch.manual_seed(seed)
    module, kwargs = {**BUILDERS, **MORE}[name](layers, dropout)
    return module.train(), kwargs


def build_double(name: str) -> Case:
    """The same in float64, inputs too."""
    module, kwargs = build(name)
    if name in FLOAT32_ONLY:
        return module, kwargs
    doubles = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in kwargs.items()
    }
    return module.double(), doubles


def loss_of(output: Any) -> Tensor:
    """The loss among a model's outputs: its one floating scalar."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return next(
        x for x in leaves if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()
    )
