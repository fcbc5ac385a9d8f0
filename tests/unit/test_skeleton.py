"""Copies of a model's structure are those that deepcopy makes, but for the memory."""

import copy
from typing import Any

import torch
from torch import nn

from graphpar.trace import skeleton


class Counts(nn.Module):
    """Its own ``__setstate__`` looks at a child."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.width = 0
        self.seen: list[int] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.width = self.layer.out_features


class Alone(nn.Module):
    """Its copies are itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = [1, 2]
        self.first, self.second, self.alone = Counts(), Counts(), Alone()
        self.first.seen = self.second.seen = self.shared
        self.second.layer.weight = self.first.layer.weight
        self.aside = (self.first, {"second": self.second})
        self.scale = torch.tensor([2.0])
        self.register_buffer("none", None)
        self.first.layer.register_forward_pre_hook(print)


def test_a_skeleton_is_a_deep_copy_without_memory() -> None:
    model = Model()
    made, whole = skeleton(model), copy.deepcopy(model)
    assert isinstance(made, Model)
    assert made.first.layer.weight is made.second.layer.weight is not model.first.layer.weight
    assert made.first.layer.weight.untyped_storage().nbytes() == 0
    assert made.first.seen is made.second.seen is made.shared is not model.shared
    assert made.aside[0] is made.first
    assert made.aside[1]["second"] is made.second
    assert made.alone is model.alone is whole.alone
    assert (made.first.width, made.scale.tolist()) == (3, [2.0])
    assert made.scale is not model.scale
    for own, other in zip(made.modules(), whole.modules(), strict=True):
        assert list(vars(own)) == list(vars(other))
        assert type(own) is type(other)
    assert [*made.first.layer._forward_pre_hooks.values()] == [print]
    made.first.layer._forward_pre_hooks.clear()
    assert model.first.layer._forward_pre_hooks
