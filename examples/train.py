"""Train a small GPT-2 of transformers on random bytes, over all processes.

torchrun --standalone --nproc-per-node 2 examples/train.py
"""

import torch
from gpt2 import model as make_model

import graphpar

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)  # the same weights, data and dropout on every rank
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

original, args, kwargs = make_model()
model = graphpar.transform(original, args, kwargs, tp=ranks, sp=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(5):
    tokens = torch.randint(256, (2, 64))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.full_tensor().item():.4f}")

torch.distributed.destroy_process_group()
