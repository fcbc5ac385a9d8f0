"""A speech model with pruned recurrences, in the manner of Deep Speech 2 (Amodei et al. 2015).

    python examples/speech.py

Convolutions over a spectrogram, bidirectional recurrent layers, and CTC. The recurrent weights are
pruned to a tenth; graphpar turns each layer and direction that gains by it into an op that reads
the non-zeros alone, and prints what it decided.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import graphpar

BANDS, LETTERS = 32, 28


class Recognizer(nn.Module):
    """Log-probabilities of letters at each time, given the spectrogram of a sound."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 4, (5, 5), stride=(2, 2), padding=2),
            nn.Hardtanh(0, 20),
            nn.Conv2d(4, 4, (5, 3), stride=(2, 1), padding=(2, 1)),
            nn.Hardtanh(0, 20),
        )
        self.layers = nn.GRU(BANDS, width, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, LETTERS)

    def forward(self, sound: Tensor) -> Tensor:
        """``sound`` is [B, bands, time]; the result [time / 2, B, letters]."""
        maps = self.front(sound[:, None])  # B, 4, bands / 4, time / 2
        frames = maps.flatten(1, 2).transpose(1, 2)
        scores: Tensor = self.head(self.layers(frames)[0])
        return scores.log_softmax(-1).transpose(0, 1)


def loss_of(scores: Tensor, letters: Tensor) -> Tensor:
    """The CTC loss of spellings [B, L] without blanks (0); ``torch.export`` does not trace it."""
    batch, count = letters.shape
    return F.ctc_loss(scores, letters, (len(scores),) * batch, (count,) * batch)


def pruned(width: int = 1024, amount: float = 0.9) -> Recognizer:
    """The model with all recurrent weights pruned."""
    model = Recognizer(width)
    for name, _ in list(model.layers.named_parameters()):
        if name.startswith("weight_hh"):
            prune.l1_unstructured(model.layers, name, amount)
    return model


def main() -> None:
    torch.manual_seed(0)
    model = pruned()
    sound, letters = torch.randn(1, BANDS, 80), torch.randint(1, LETTERS, (1, 9))
    parallel = graphpar.transform(model, (sound,), tp=1)
    for name, decision in parallel.report["sparse_rnn"].items():
        print(f"{name}: {decision}, {decision.speedup:.1f} times as fast by the model")
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)
    for step in range(3):
        loss = loss_of(parallel(sound), letters)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
