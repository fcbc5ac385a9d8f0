"""Sizes and inputs that all models of the zoo share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQ, VOCAB, WIDTH, INNER = 2, 16, 96, 64, 96
Case = tuple[nn.Module, dict[str, Any]]


def tokens(length: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, length))


def language_model(module: nn.Module) -> Case:
    ids = tokens()
    return module, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def special_tokens() -> dict[str, int]:
    return {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
