"""Torch's functions in place of ATen overloads: the same overload runs, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.native import NATIVE

X, Y, M = torch.rand(2, 3, 4) + 0.5, torch.rand(2, 3, 4) + 0.5, torch.rand(3, 3)
Q, H = torch.rand(2, 2, 3, 4), torch.rand(2, 3, 4).half()
_ARITHMETIC: list[tuple[Any, ...]] = [(X, Y), (X, 2), (X, 2.5), (X, True), (X, M[0, 0]), (H, 2.5)]
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "add.Tensor": [*_ARITHMETIC, (X.long(), 2), (X, Y, {"alpha": 2})],
    "addmm.default": [(M[0], M, M), (M, M, M, {"beta": 2, "alpha": 3})],
    "amax.default": [(X,), (X, [-1]), (X, [0, 2], True)],
    "baddbmm.default": [(X @ X.mT, X, Y.mT), (X @ X.mT, X, Y.mT, {"beta": 2})],
    "bmm.default": [(X, Y.mT)],
    "cat.default": [([X, Y],), ([X, Y], -1), ([X, H], 1)],
    "clone.default": [(X,), (X.mT, {"memory_format": torch.contiguous_format})],
    "contiguous.default": [(X.mT,), (X,)],
    "cumsum.default": [(X, 1), (X, -1, {"dtype": torch.float64})],
    "div.Tensor": [*_ARITHMETIC, (X.long(), 2)],
    "dropout.default": [(X, 0.5, False), (X, 0.0, True), (X, 1.0, True)],
    "embedding.default": [(M, torch.tensor([0, 2])), (M, torch.tensor([[1]]), 1, False, False)],
    "expand.default": [(X[:1], [2, 3, 4]), (X[:, :1], [-1, 3, -1]), (X, [5, 2, 3, 4])],
    "gelu.default": [(X,), (X, {"approximate": "tanh"})],
    "layer_norm.default": [
        (X, [4]),
        (X, [3, 4], X[0], X[1], 1e-3),
        (X, [4], None, None, 1e-5, True),
    ],
    "linear.default": [(X, Y[0]), (X, Y[0], M[0]), (X[0], Y[0], None)],
    "matmul.default": [(X, Y[0].t()), (X, Y.mT), (M, M[0])],
    "mean.dim": [
        (X, [-1], True),
        (X, [0, 1]),
        (X, None),
        (H, [1], False, {"dtype": torch.float32}),
    ],
    "mm.default": [(M, M)],
    "mul.Tensor": [*_ARITHMETIC, (X.long(), 2)],
    "permute.default": [(X, [2, 0, 1])],
    "pow.Tensor_Scalar": [(X, 2), (X, 0.5), (X.long(), 2), (H, 3.0)],
    "reshape.default": [(X, [6, 4]), (X.mT, [-1])],
    "scaled_dot_product_attention.default": [
        (Q, Q, Q),
        (Q, Q, Q, None, 0.0, True),
        (Q, Q, Q, M, 0.0, False, {"scale": 0.25}),
        (Q, Q[:, :1], Q[:, :1], {"enable_gqa": True}),
    ],
    "select.int": [(X, 1, 0), (X, -1, 2)],
    "softmax.int": [(X, -1), (H, -1, torch.float32)],
    "split_with_sizes.default": [(X, [1, 3], -1), (X, [1, 2], 1)],
    "squeeze.dim": [(X[:1], 0), (X, 1)],
    "stack.default": [([X, Y],), ([X, Y], -1)],
    "sub.Tensor": [(X, Y), (X, 2), (H, 2.5), (X, M[0, 0]), (X, Y, {"alpha": 2})],
    "sum.dim_IntList": [(X, [-1], True), (X, None), (H, [0], False, {"dtype": torch.float32})],
    "t.default": [(M,), (M[0],)],
    "transpose.int": [(X, 1, 2), (X, -1, 0)],
    "unsqueeze.default": [(X, 0), (X, -1)],
    "view.default": [(X, [6, 4]), (X, [-1, 2])],
    "where.self": [(X > 1, X, Y), (X > 1, X, M[0, 0])],
}
"""Positional arguments, and named ones in a dict behind them. Others take one tensor."""


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in pytree.tree_leaves((args, kwargs)) if not isinstance(a, Tensor)]
        self.seen.append((func, given))
        return func(*args, **(kwargs or {}))


def called(function: Any, args: tuple[Any, ...]) -> tuple[list[Any], list[Tensor], Any]:
    """The ops below autograd, results and gradients, and the node of autograd."""
    *given, named = (*args, {}) if not isinstance(args[-1], dict) else args

    def trained(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point())

    given, named = pytree.tree_map_only(Tensor, trained, (given, named))
    leaves = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    with Ops() as ops:
        result = function(*given, **named)
    results = [result] if isinstance(result, Tensor) else list(result)
    total = sum(x.sum() for x in results)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()  # type: ignore[arg-type]
    return ops.seen, [*results, *(g for g in grads if g is not None)], type(results[0].grad_fn)


@pytest.mark.parametrize("name", NATIVE)
def test_the_same_call(name: str) -> None:
    bare = name.removeprefix("aten::")
    overload: Any = torch.ops.aten
    for part in bare.split("."):
        overload = getattr(overload, part)
    for args in CALLS.get(bare, [(X,)]):
        found, wanted = called(eval(NATIVE[name]), args), called(overload, args)
        assert found[0] == wanted[0]
        assert found[2] == wanted[2]
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, check_stride=True)
