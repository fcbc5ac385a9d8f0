"""Which modules of a model are worth tracing once: those that others look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from torch import Tensor, nn

_OWN_OPS = 10
"""What a module with children counts for beside them, where a module without any counts for 1."""


def repeated_modules(model: nn.Module) -> set[int]:
    """The ids of the modules whose calls are compared with each other while the model is traced.

    Two modules look alike if their classes, parameters and buffers (by name, shape, dtype) and
    children do: a guess that costs time if it is wrong, for what they do is compared op by op.
    Of nested ones that repeat (layers, the experts of each) those are taken that leave the least
    to trace.
    """
    looks: dict[int, Hashable] = {}
    forms: dict[Hashable, int] = {}
    ordered = _children_first(model)
    for module in ordered:
        form = (type(module), _tensors(module), tuple(_children(module, looks)))
        looks[id(module)] = forms.setdefault(form, len(forms))
    # A module under several paths is called by each of them.
    everywhere = model.named_modules(remove_duplicate=False)
    counts = Counter(looks[id(module)] for _, module in everywhere)
    size: dict[int, float] = {}
    cost: dict[int, float] = {}
    chosen: set[int] = set()
    for module in ordered:
        below = [id(child) for child in module.children()]
        own = _OWN_OPS if below else 1
        size[id(module)] = own + sum(size[child] for child in below)
        apart = own + sum(cost[child] for child in below)
        shared = size[id(module)] / counts[looks[id(module)]]
        worth = bool(below) and shared < apart
        if worth:
            chosen.add(id(module))
        cost[id(module)] = shared if worth else apart
    return chosen


def _children_first(model: nn.Module) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if id(child) not in found:
                visit(child)
        found[id(module)] = module

    visit(model)
    return list(found.values())


def _tensors(module: nn.Module) -> Hashable:
    held = (*module._parameters.items(), *module._buffers.items())
    return tuple((name, _form(value)) for name, value in held)


def _form(value: Tensor | None) -> Hashable:
    return None if value is None else (value.shape, value.dtype, value.requires_grad)


def _children(module: nn.Module, looks: dict[int, Hashable]) -> list[Hashable]:
    return [(name, looks[id(child)]) for name, child in module.named_children()]
