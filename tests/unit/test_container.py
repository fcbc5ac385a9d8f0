"""What users do with the module afterwards: copies, plain attributes, hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import graphpar
from graphpar.errors import GraphparWarning
from graphpar.parallel_module import ParallelModule


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.scale  # type: ignore[no-any-return]


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def transformed(**options: object) -> ParallelModule:
    torch.manual_seed(0)
    return graphpar.transform(Scaled(), (X,), tp=1, **options)  # type: ignore[arg-type]


def test_a_deep_copy_has_its_own_parameters_and_hooks() -> None:
    parallel = transformed()
    parallel.register_forward_hook(lambda module, args, result: result + 1)
    copied = copy.deepcopy(parallel)
    before = parallel(X)
    assert torch.equal(copied(X), before)
    assert copied.program is parallel.program
    copied(X).sum().backward()
    assert all(p.grad is None for p in parallel.parameters())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(parallel(X), before)
    assert torch.equal(copied(X), torch.ones(3, 2))
    copied.load_state_dict(parallel.state_dict())
    assert torch.equal(copied.eval()(X), before)
    assert parallel.training


def test_a_deep_copy_before_the_first_call() -> None:
    torch.manual_seed(0)
    model = Scaled()
    parallel = graphpar.transform(model, tp=1)
    copied = copy.deepcopy(parallel)
    with torch.no_grad():
        model.head.bias.add_(1)
    torch.testing.assert_close(parallel(X), copied(X) + 2)


def test_plain_attributes_that_change_nothing_warn() -> None:
    parallel = transformed()
    with pytest.warns(GraphparWarning, match="scale of Scaled was read while the model was traced"):
        parallel.scale = 3.0
    with pytest.warns(GraphparWarning, match="in_features of Linear was read"):
        parallel.get_submodule("head").in_features = 3  # type: ignore[assignment]
    parallel.mine = 1


def test_hooks_that_are_never_called_warn() -> None:
    parallel = transformed()
    called: list[str] = []
    for name in ("", "layers.1"):
        parallel.get_submodule(name).register_forward_hook(lambda *_, n=name: called.append(n))
    parallel(X)
    assert called == ["layers.1", ""]
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        with pytest.warns(GraphparWarning, match="hooks of this Linear are not called"):
            getattr(parallel.get_submodule("head"), f"register_{register}")(lambda *_: None)
