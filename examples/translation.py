"""A translation model with pruned recurrences, in the manner of GNMT (Wu et al. 2016).

    python examples/translation.py

A bidirectional LSTM encodes the source, an LSTM decodes the target, and attention joins them. Their
recurrent weights are pruned to a tenth; graphpar turns each layer and direction that gains by it
into an op that reads the non-zeros alone, and prints what it decided.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar

VOCABULARY = 256


class Translator(nn.Module):
    """The loss of a target, given its source and its words so far."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width)
        self.target = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, bidirectional=True)
        self.joined = nn.Linear(2 * width, width)
        self.decoder = nn.LSTM(width, width, num_layers=2, dropout=0.1)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """``source`` [S, B] and ``target`` [T, B] are words."""
        encoded = self.joined(self.encoder(self.source(source))[0]).transpose(0, 1)
        decoded = self.decoder(self.target(target[:-1]))[0].transpose(0, 1)
        seen = F.scaled_dot_product_attention(decoded, encoded, encoded)
        logits = self.head(torch.cat((decoded, seen), -1))
        return F.cross_entropy(logits.flatten(0, 1), target[1:].t().flatten())


def pruned(width: int = 1024, amount: float = 0.9) -> Translator:
    """The model with all recurrent weights pruned."""
    model = Translator(width)
    for module in (model.encoder, model.decoder):
        for name, _ in list(module.named_parameters()):
            if name.startswith("weight_hh"):
                prune.l1_unstructured(module, name, amount)
    return model


def main() -> None:
    torch.manual_seed(0)
    model = pruned()
    source, target = torch.randint(VOCABULARY, (40, 1)), torch.randint(VOCABULARY, (41, 1))
    parallel = graphpar.transform(model, (source, target), tp=1)
    for name, decision in parallel.report["sparse_rnn"].items():
        print(f"{name}: {decision}, {decision.speedup:.1f} times as fast by the model")
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)
    for step in range(3):
        loss = parallel(source, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
