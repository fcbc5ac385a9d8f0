"""Idle ops are dropped, constants folded, causal masks found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.trace import trace
from tests import zoo
from tests.unit.trace_checks import Lambda, check, targets, x_

aten = torch.ops.aten


def test_idle_ops_are_dropped() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        x = x.to(torch.float32).contiguous().clone().view(2, 8).expand(2, 8)[:, :]
        x = F.dropout(x, 0.0, True)
        return m.a(F.dropout(x, 0.5, False)).view(16)  # type: ignore[no-any-return]

    assert targets(check(Lambda(forward), x_())) == ["aten.linear.default", "aten.reshape.default"]


def test_constants_are_folded() -> None:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Any:
        angles = torch.outer(torch.arange(2.0), 1 / torch.arange(1, 9)).cos()
        ones = torch.ones_like(x) * 3
        return m.a(x) * angles + ones + torch.arange(8) + torch.tensor([[1.0], [2.0]])

    program = check(Lambda(forward), x_())
    assert list(program.constants) == ["constant_0", "constant_1"]
    assert program.state["constant_0"].kind == "constant"
    assert targets(program).count("aten.full.default") == 1
    assert targets(program).count("aten.arange.default") == 1
    assert "aten.cos.default" not in targets(program)


def test_only_what_a_checkpoint_cannot_change_is_folded() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(8))
            self.register_buffer("fixed", torch.arange(8.0), persistent=False)
            self.kept: Tensor
            self.fixed: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x + self.kept.sqrt() + self.fixed.sqrt()

    program = check(Buffers(), x_())
    assert targets(program) == ["aten.sqrt.default", "aten.add.Tensor", "aten.add.Tensor"]


def attention(mask: Any) -> Any:
    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        q = m.a(x).view(2, 4, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(x))

    return forward


def causal(x: Tensor) -> Tensor:
    return torch.ones(4, 4, dtype=torch.bool).tril()


def additive(x: Tensor) -> Tensor:
    low = torch.finfo(x.dtype).min
    return torch.full((4, 4), low).triu(1)[None, None].expand(2, 1, 4, 4)


def window(x: Tensor) -> Tensor:
    return causal(x).triu(-1)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (causal, (None, True)),
        (additive, (None, True)),
        (lambda x: torch.ones(2, 1, 4, 4, dtype=torch.bool), (None, False)),
        (window, "kept"),
        (lambda x: causal(x) & (x[0, 0, 0] < 100), "kept"),
    ],
)
def test_masks(mask: Any, kind: Any) -> None:
    program = check(Lambda(attention(mask)), x_(2, 4, 8))
    node = next(n for n in program.graph.nodes if "scaled_dot" in n.name)
    if kind == "kept":
        assert node.args[3] is not None
    else:
        assert (node.args[3], node.args[5]) == kind


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mixtral"])
def test_transformers_masks_are_causal_on_meta_too(name: str) -> None:
    with torch.device("meta"):
        model, kwargs = zoo.build(name, layers=1)
    program = trace(model, (), kwargs)
    node = next(n for n in program.graph.nodes if "scaled_dot" in n.name)
    assert (node.args[3], node.args[5]) == (None, True)
    assert all(v.device.type == "cpu" for v in program.constants.values())


def test_big_constants_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpar.trace.fold.MAX_CONSTANT_BYTES", 100)

    def forward(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        row = torch.arange(8).float().sqrt()
        return m.a(x) + (row[:, None] * row)[:2]  # type: ignore[no-any-return]

    program = check(Lambda(forward), x_())
    assert [v.shape for v in program.constants.values()] == [(2, 8)]

    def wide(m: Any, x: Tensor, y: Any, flag: bool) -> Tensor:
        row = torch.arange(8).float().sqrt()
        return m.a(x) @ (row[:, None] * row)  # type: ignore[no-any-return]

    program = check(Lambda(wide), x_())
    assert sorted(v.shape for v in program.constants.values()) == [(8,), (8, 1)]
