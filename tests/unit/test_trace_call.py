"""Calls: binding, flattening, keys of traces, declared examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.errors import InputError
from graphpar.trace import bind, call_key, example_inputs, flatten, unflatten
from tests import zoo


class Plain(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, *, flag: bool = False) -> Tensor:
        return x


class Open(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        return x


@dataclass
class Batch:
    x: Tensor
    name: str


X, Y = torch.ones(2, 3), torch.zeros(2, 3)


def test_position_and_keyword_are_equal() -> None:
    forms = [
        bind(Plain(), (X, Y), {"flag": True}),
        bind(Plain(), (X,), {"flag": True, "y": Y}),
        bind(Plain(), (), {"flag": True, "y": Y, "x": X}),
    ]
    for args, kwargs in forms:
        assert args == ()
        assert list(kwargs) == ["x", "y", "flag"]
    keys = {call_key(*form) for form in forms}
    assert len(keys) == 1


def test_variadic_arguments() -> None:
    assert bind(Open(), (X,), {"b": 1, "a": 2}) == ((), {"x": X, "a": 2, "b": 1})
    args, kwargs = bind(Open(), (X, Y, X), {"a": 2})
    assert [a is b for a, b in zip(args, (X, Y, X), strict=True)] == [True] * 3
    assert kwargs == {"a": 2}


def test_plain_functions_and_positional_only() -> None:
    def f(a: int, /, b: int) -> None: ...

    assert bind(f, (1, 2)) == ((1,), {"b": 2})


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((X, X, X), {}, "too many positional arguments"),
        ((X,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((X,), {"x": X}, "multiple values for argument 'x'"),
        ((), {}, "missing a required argument: 'x'"),
    ],
)
def test_wrong_arguments(args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        bind(Plain(), args, kwargs)
    assert "flag: " in str(caught.value)


def test_keys() -> None:
    key = call_key((X,), {"flag": True})
    assert key == call_key((X + 1,), {"flag": True})
    assert hash(key) == hash(call_key((X + 1,), {"flag": True}))
    different = [
        call_key((X,), {"flag": 1}),
        call_key((X,), {"flag": False}),
        call_key((X[:1],), {"flag": True}),
        call_key((X.double(),), {"flag": True}),
        call_key((X.clone().requires_grad_(),), {"flag": True}),
        call_key((X.to("meta"),), {"flag": True}),
        call_key((X,), {"flag": None}),
        call_key(([X],), {"flag": True}),
        call_key((), {"flag": True, "x": X}),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        different.append(call_key((X,), {"flag": True}))
    assert len({key, *different}) == len(different) + 1


def test_flatten_registers_dataclasses() -> None:
    leaves, spec = flatten((Batch(X, "a"),), {"rest": [Y, {"k": None}]})
    assert [type(leaf) for leaf in leaves] == [Tensor, str, Tensor, type(None)]
    (batch,), rest = unflatten(leaves, spec)
    assert isinstance(batch, Batch)
    assert batch.name == "a"
    assert rest["rest"][0] is Y
    assert call_key((Batch(X, "a"),)) != call_key((Batch(X, "b"),))


def test_declared_examples() -> None:
    assert example_inputs(Plain()) is None
    model, _ = zoo.build("gpt2", layers=1)
    found = example_inputs(model)
    assert found is not None
    assert list(found[1]) == ["input_ids"]
    plain = Plain()
    plain.dummy_inputs = (X, Y)  # type: ignore[assignment]
    assert example_inputs(plain) == ((), {"x": X, "y": Y})
