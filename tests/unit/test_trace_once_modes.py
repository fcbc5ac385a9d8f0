"""Tracing once where the model asks of tensors between its layers, or has modes around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.unit.layer_stack import WIDTH, Layer, Stack
from tests.unit.trace_checks import check_once, names


def test_questions_outside_of_layers() -> None:
    class Views(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).transpose(0, 1).transpose(0, 1)

    class Asks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x = x * 2 if x._is_view() else x * 3
            return x

    assert "the model asks for Tensor._is_view" in str(check_once(Asks(Views)).flat)


class EveryOther(TorchFunctionMode):
    """A mode of the user's, on outside of the layers."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh:
            self.calls += 1
            func = torch.sin if self.calls % 3 else torch.cos
        return func(*args, **(kwargs or {}))


def test_modes_around_the_layers() -> None:
    class Tanh(Layer):
        def change(self, x: Tensor) -> Any:
            return torch.tanh(x) + torch.zeros(WIDTH).to(x)

    class Around(Stack):
        mode: Callable[[int], Any]

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                with self.mode(i):
                    x = layer(x)
            return x

    model = Around(Tanh)
    device = torch.device
    model.mode = lambda i: device("meta" if i == 1 else "cpu")
    assert names(check_once(model)) == ["layers.2", "layers.3"]
    model.mode = lambda i: EveryOther()
    assert names(check_once(model)) == []
