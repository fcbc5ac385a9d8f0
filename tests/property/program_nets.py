"""Random programs as data, and as modules that wire parts together."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.property.program_parts import PARTS


@dataclass(frozen=True)
class Step:
    """A part and the values it is called on, by number. Three parts are not in the table:
    "again" calls an earlier ``step`` once more, "tied" is a projection with the weight of an
    earlier ``step``, "layers" are ``count`` copies of a ``body`` (or one, called so often).

    ``frozen``: which parameters do not learn ("all", or those whose names end like that)."""

    part: str
    inputs: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    frozen: str = ""


@dataclass(frozen=True)
class Body:
    """Steps in order; values are numbered from the inputs on, as the steps make them."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    named: bool = False


@dataclass(frozen=True)
class Input:
    """``kind``: "grad" and "plain" are floating, "ids" are integers below 7, "mask" is bool."""

    kind: str
    shape: tuple[int, ...]


def make_input(given: Input) -> Tensor:
    if given.kind == "ids":
        return torch.randint(0, 7, given.shape)
    if given.kind == "mask":
        return torch.rand(given.shape) < 0.7
    return torch.randn(given.shape, dtype=torch.float64, requires_grad=given.kind == "grad")


def randomise(model: nn.Module) -> None:
    """Norm weights that are not ones, biases that are not zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


class Net(nn.Module):
    """Runs a :class:`Body`. Made step by step, each part for the values it gets."""

    def __init__(self, body: Body, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.body = Body((), (), body.named)
        self.parts: list[nn.Module] = []
        if not body.named:
            self.steps = nn.ModuleList()
        self.values = [value.detach() for value in inputs]
        for step in body.steps:
            self.add(step)
        self.body = Body(self.body.steps, body.outputs, body.named)
        self.values = []

    def add(self, step: Step) -> list[Tensor]:
        """Append a step; its results."""
        xs = [self.values[i] for i in step.inputs]
        part, shared = self._part(step, xs), "step" in step.options
        part.double()
        if step.frozen:
            for name, parameter in part.named_parameters():
                if step.frozen == "all" or name.endswith(step.frozen):
                    parameter.requires_grad_(False)
        with torch.no_grad():
            results = as_list(part(*xs))
        if step.part == "again":
            self.parts.append(part)
        elif self.body.named:
            setattr(self, f"{step.part}_{len(self.body.steps)}", part)
            self.parts.append(part)
        else:
            self.steps.append(part)
            self.parts.append(part)
        assert not shared or step.part in ("again", "tied")
        self.values += results
        self.body = Body((*self.body.steps, step), (), self.body.named)
        return results

    def _part(self, step: Step, xs: list[Tensor]) -> nn.Module:
        options = dict(step.options)
        if step.part == "again":
            return self.parts[options["step"]]  # type: ignore[no-any-return]
        if step.part == "layers":
            return Layers(xs, **options)
        if step.part == "tied":
            weight = self.parts[options["step"]].weight
            assert isinstance(weight, nn.Parameter)
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            head.weight = weight
            return head
        part: nn.Module = PARTS[step.part](xs, **options)
        return part

    def forward(self, *inputs: Tensor) -> Any:
        values = list(inputs)
        for step, part in zip(self.body.steps, self.parts, strict=True):
            values += as_list(part(*[values[i] for i in step.inputs]))
        results = tuple(values[i] for i in self.body.outputs)
        return results if len(results) > 1 else results[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Net:
        """``parts`` stands for the children, which a copy has of its own."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


class Layers(nn.Module):
    """Layers in a row; what they give besides their first result is collected."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        body: Body,
        count: int = 2,
        shared: bool = False,
        named: bool = False,
    ) -> None:
        super().__init__()
        made = [Net(body, xs) for _ in range(1 if shared else count)]
        self.order = [0] * count if shared else list(range(count))
        self.named = named
        if named:
            for number, layer in enumerate(made):
                setattr(self, f"layer_{'abc'[number]}", layer)
        else:
            self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        extras: list[Tensor] = []
        for number in self.order:
            layer = getattr(self, f"layer_{'abc'[number]}") if self.named else self.layers[number]
            x, *extra = as_list(layer(x, *rest))
            extras += extra
        return (x, *extras) if extras else x


class Model(nn.Module):
    """The outermost module: arguments by position and by name, outputs in a dict."""

    def __init__(self, body: Body, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.net = Net(body, inputs)

    def forward(
        self,
        x0: Tensor,
        x1: Tensor | None = None,
        x2: Tensor | None = None,
        x3: Tensor | None = None,
    ) -> dict[str, Tensor]:
        results = as_list(self.net(*[x for x in (x0, x1, x2, x3) if x is not None]))
        return {f"y{i}": value for i, value in enumerate(results)}
