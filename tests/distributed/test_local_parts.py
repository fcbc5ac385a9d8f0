"""Parameters that are added to each other, on gloo processes: their gradients are their own."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphpar
from tests.distributed.harness import run_processes


class Sums(nn.Module):
    """Weights that are sums of parameters, and one that two ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.change = (nn.Parameter(torch.randn(16, 8)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(8, 16))
        self.scale, self.shift = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * (self.scale + self.shift)) @ (self.up + self.change).t()
        return x + torch.tanh(y) @ self.down.t() * self.scale


def whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(rank: int, group: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = Sums().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    for sp in (True, False):
        twin = copy.deepcopy(model)
        parallel = graphpar.transform(model, (x,), tp=2, sp=sp)
        copied = copy.deepcopy(parallel.state_dict())
        for module in (parallel, twin):
            for _ in range(2):
                module(x).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for name, parameter in twin.named_parameters():
            found = whole(parallel.get_parameter(name).grad)
            torch.testing.assert_close(found, whole(parameter.grad), rtol=1e-12, atol=1e-12)
        parallel.load_state_dict(copied)
        with torch.no_grad():
            torch.testing.assert_close(parallel(x), twin(x), rtol=1e-12, atol=1e-12)


def test_clipped_gradients_of_sums() -> None:
    run_processes(2, trained, timeout=120)
