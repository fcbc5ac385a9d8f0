"""Layers traced once give the program that tracing every layer gives: ops, state, source lines."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

import graphpar
from graphpar.errors import InputError
from graphpar.passes.outline import outline
from graphpar.trace import trace
from tests.unit.layer_stack import TOKENS, WIDTH, Layer, Stack
from tests.unit.layers_in_modes import Attention
from tests.unit.trace_checks import assert_same_program, check_once, names
from tests.unit.unlike_layers import ALL, KINDS, DropPath, Inner, InPlace, Remembered, SharedList


def test_equal_layers_are_traced_once() -> None:
    report = check_once(Stack())
    assert names(report) == ["layers.1", "layers.2", "layers.3"]
    assert str(report) == "trace: layers.0 once for itself and 3 more Layer"


def test_the_mode_is_checked() -> None:
    with pytest.raises(InputError, match="one of 'once', 'flat', not 'twice'"):
        graphpar.transform(Stack(), tp=1, trace="twice")


def test_transform_has_the_report() -> None:
    given = (torch.zeros(2, TOKENS, WIDTH),)
    parallel = graphpar.transform(Stack(), given, tp=2)
    assert names(parallel.report["trace"]) == ["layers.1", "layers.2", "layers.3"]
    flat = graphpar.transform(Stack(), given, tp=2, trace="flat")
    assert not flat.report["trace"].layers


@pytest.mark.parametrize(("kind", "folded"), KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_layers_that_differ(
    kind: type[Layer], folded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> None:
        monkeypatch.setattr(Inner, "count", 0)
        SharedList.seen.clear()
        Remembered.last.clear()

    torch.manual_seed(0)
    model = Stack(kind)
    given = (torch.zeros(2, TOKENS, WIDTH),)
    fresh()
    flat = trace(copy.deepcopy(model), given, mode="flat")
    fresh()
    once = trace(copy.deepcopy(model), given)
    fresh()
    assert_same_program(flat, once)
    assert_same_program(outline(flat), outline(once))
    assert names(once.report["trace"]) == folded


class Outputs(Layer):
    """Another structure of results on some indices."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, y.mean()) if self.index % 2 else y


class Caches(Layer):
    """Keeps and reads what a cache holds for its index."""

    def forward(self, x: Any) -> Any:
        x, cache = x
        y: Tensor = super().forward(x)
        cache[self.index] = y
        return y + cache.get(self.index - 1, y)


class Collects(Stack):
    def forward(self, x: Tensor) -> Any:
        found, cache = [], dict[int, Tensor]()
        x = self.first(x)
        for layer in self.layers:
            y = layer((x, cache) if isinstance(layer, Caches) else x)
            x = y[0] if isinstance(y, tuple) else y
            found += list(y[1:]) if isinstance(y, tuple) else []
        return x, found, cache


@pytest.mark.parametrize(("scaled", "count"), [(True, 0), (False, 2)])
def test_gpt2_whose_attention_is_scaled_by_layer(scaled: bool, count: int) -> None:
    sizes = {"n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    config = GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=scaled, use_cache=False)
    assert len(check_once(GPT2Model(config), torch.zeros(1, 4, dtype=torch.long)).folded) == count


def test_structures_of_results_and_caches() -> None:
    assert names(check_once(Collects(Outputs))) == ["layers.2", "layers.3"]
    assert names(check_once(Collects(Caches))) == ["layers.2", "layers.3"]


def test_a_weight_tied_between_two_layers() -> None:
    model = Stack()
    model.layers[1].up.weight = model.layers[2].up.weight  # type: ignore[union-attr]
    model.layers[3].down.bias = model.layers[3].norm.bias  # type: ignore[union-attr]
    assert names(check_once(model)) == ALL


def test_frozen_parameters_make_another_group() -> None:
    model = Stack()
    for layer in list(model.layers)[:2]:
        layer.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    assert names(check_once(model)) == ["layers.1", "layers.3"]


def test_hooks_on_one_layer() -> None:
    model = Stack()
    model.layers[1].register_forward_hook(lambda module, args, out: out * 2)
    model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.layers[2].up.register_forward_hook(lambda module, args, out: None)  # type: ignore[union-attr]
    assert names(check_once(model)) == ["layers.3"]


def test_flags_of_one_layer() -> None:
    model = Stack(DropPath)
    for layer in model.layers:
        layer.index = 3  # type: ignore[assignment]
    model.layers[2].eval()
    assert names(check_once(model)) == ["layers.1", "layers.3"]


def test_modules_replaced_in_one_layer() -> None:
    model = Stack()
    model.layers[1].norm = nn.Identity()
    model.layers[2].up = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH))
    assert names(check_once(model)) == ["layers.3"]


class Holder(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.block = Layer(0)
        self.rest = nn.ModuleDict({str(i): Layer(i) for i in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        for layer in self.rest.values():
            x = layer(x)
        return x


def test_layers_of_any_container() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Layer(0), Holder(2), nn.Sequential(Layer(1)), Holder(1)
    )
    assert len(names(check_once(model))) == 6


def test_one_layer_called_again_and_shared_under_two_names() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(WIDTH, WIDTH)
            self.first = Layer(0)
            self.layers = nn.ModuleList([Layer(1), self.first, Layer(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.start(x)
            for layer in [self.first, *self.layers, *self.layers, self.first]:
                x = layer(x)
            return x

    assert len(names(check_once(Again()))) == 7


def test_one_layer_called_again_and_again() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layer = nn.Sequential(Layer(0))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(5):
                x = self.layer(x)
            return x

    report = check_once(Again())
    assert [each.folded for each in report.layers] == [False, True, True, True]


def test_one_stack_called_again() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()

        def forward(self, x: Tensor) -> Any:
            return self.stack(self.stack(x))

    assert len(names(check_once(Again()))) == 7


def test_layers_made_in_the_forward() -> None:
    class Makes(Stack):
        def forward(self, x: Tensor) -> Any:
            for _ in range(3):
                x = nn.Sequential(nn.Tanh(), nn.Sigmoid())(x)
            return super().forward(x)

    assert names(check_once(Makes())) == ALL


def test_a_function_of_its_own_in_every_layer() -> None:
    class Own(torch.autograd.Function):  # never traced before
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.sign(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Signs(Layer):
        def change(self, x: Tensor) -> Any:
            return Own.apply(x)  # type: ignore[no-untyped-call]

    report = trace(Stack(Signs), (torch.zeros(2, TOKENS, WIDTH),)).report["trace"]
    assert names(report) == ALL


def test_library_layers_called_from_several_lines() -> None:
    class Lines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = nn.TransformerEncoderLayer
            self.layers = nn.ModuleList(make(WIDTH, 2, 16, batch_first=True) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            x = self.layers[0](x)
            x = self.layers[1](x)
            for layer in (self.layers[2], self.layers[3]):
                x = layer(x)
            return x

    report = check_once(Lines())
    assert names(report)[-1:] == ["layers.3"]


def test_writes_through_views_across_layers() -> None:
    class Slices(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            for layer in self.layers:
                part = x[..., : WIDTH // 2]
                y = layer(x)
                part += y[..., : WIDTH // 2]
                y.mul_(2)
                x = x + y
            return x

    check_once(Slices(InPlace))


class HandsBack(Layer):
    """Returns its input, a view of it, and a tensor that it wrote to."""

    def forward(self, x: Tensor) -> Any:
        same, view = x, x.transpose(0, 1)
        x = self.down(self.up(x))
        x += 1
        return x, same, view


def test_results_that_are_inputs() -> None:
    class Uses(Stack):
        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x, same, view = layer(x * 1)
                same *= 2
                x = x + view.transpose(0, 1)
            return x

    check_once(Uses(HandsBack))


def test_gradients_and_masks_are_the_same() -> None:
    torch.manual_seed(0)
    model = Stack(Attention)
    x = torch.randn(2, TOKENS, WIDTH)
    graphpar.testing.assert_equivalent(model, (x,), tp=2, sp=True)
    found = []
    for mode in ("once", "flat"):
        torch.manual_seed(1)
        parallel = graphpar.transform(copy.deepcopy(model), (x,), tp=1, trace=mode)
        torch.manual_seed(2)
        parallel(x).square().sum().backward()
        found.append([p.grad for p in parallel.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
        assert math.isfinite(float(a.sum()))


def test_new_sizes_are_traced_with_symbols() -> None:
    model = Stack()
    parallel = graphpar.transform(model, (torch.zeros(2, TOKENS, WIDTH),), tp=1)
    x = torch.randn(3, TOKENS + 1, WIDTH)
    assert torch.equal(parallel(x), model(x))
    longer = torch.randn(3, TOKENS + 2, WIDTH)
    assert torch.equal(parallel(longer), model(longer))


def test_an_error_is_that_of_the_model() -> None:
    class Fails(Layer):
        def change(self, x: Tensor) -> Any:
            return x if self.index < 2 or x.sum() > 0 else -x

    messages = []
    for mode in ("once", "flat"):
        with pytest.raises(graphpar.GraphparError) as error:
            trace(Stack(Fails), (torch.zeros(2, TOKENS, WIDTH),), mode=mode)
        messages.append((str(error.value), error.value.__notes__))
    assert messages[0] == messages[1]
