"""A small GPT-2 of transformers with random weights.

graphpar dump examples/gpt2.py:model --tp 8 --sp
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def model() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = GPT2Config(
        n_layer=4,
        n_head=8,
        n_embd=128,
        n_positions=64,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(256, (2, 64))
    call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    module = GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # what it takes by itself, with a message
    return module, (), call
