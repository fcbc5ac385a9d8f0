"""A pruned LSTM language model that is fine-tuned on text, byte by byte.

    python examples/language_model.py [FILE]

It is trained dense, its recurrent weights are pruned to a tenth by magnitude, and it is trained on
with the mask (Zhu et al. 2018 take models pruned like this): once as PyTorch has it, which
multiplies the dense matrix with the mask, and once through graphpar, which reads the non-zeros
alone. The losses follow each other. FILE is the text, by default this project's README.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar

README = Path(__file__).parents[1] / "README.md"


class Speller(nn.Module):
    """The loss of predicting each byte of ``text`` [T, B] from those before it."""

    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(text[:-1]))
        return F.cross_entropy(self.head(states).flatten(0, 1), text[1:].flatten())


def batches(text: bytes, *, steps: int, length: int, batch: int, seed: int) -> list[Tensor]:
    """Pieces of a text [length + 1, batch], from random places."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.tensor(list(text))
    places = torch.randint(len(data) - length, (steps, batch), generator=generator)
    return [data[place + torch.arange(length + 1)[:, None]] for place in places]


def train(model: Callable[[Tensor], Tensor], parameters: object, data: list[Tensor]) -> list[float]:
    """The loss at each step."""
    optimizer = torch.optim.Adam(parameters, lr=5e-3)  # type: ignore[arg-type]
    losses = []
    for piece in data:
        loss = model(piece)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(
    text: bytes, *, width: int, steps: int, sparse: bool, mode: bool | str = "auto"
) -> tuple[list[float], list[float], nn.Module]:
    """Losses before and after pruning, and the model that was fine-tuned."""
    torch.manual_seed(0)
    model = Speller(width)
    sizes = {"length": 16, "batch": 2}
    before = train(model, model.parameters(), batches(text, steps=2 * steps, seed=1, **sizes))
    prune.l1_unstructured(model.lstm, "weight_hh_l0", 0.9)
    data = batches(text, steps=steps, seed=2, **sizes)
    tuned: nn.Module = model
    if sparse:
        tuned = graphpar.transform(model, (data[0],), tp=1, sparse_rnn=mode)
    return before, train(tuned, tuned.parameters(), data), tuned


def main() -> None:
    text = Path(*sys.argv[1:2] or [README]).read_bytes()
    losses = {}
    for sparse in (False, True):
        before, after, tuned = run(text, width=512, steps=60, sparse=sparse)
        losses[sparse] = after
        if sparse:
            for name, decision in tuned.report["sparse_rnn"].items():  # type: ignore[operator, union-attr]
                print(f"{name}: {decision}")
    print(f"dense until {before[-1]:.3f}, then pruned to a tenth")
    for step in range(0, len(losses[True]), 10):
        masked, sparse_loss = losses[False][step], losses[True][step]
        print(f"step {step}: masked {masked:.4f}, non-zeros alone {sparse_loss:.4f}")


if __name__ == "__main__":
    main()
