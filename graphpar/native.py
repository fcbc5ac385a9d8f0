"""native: torch's own functions for ATen overloads, which cost half as much to call.

``torch.ops.aten.mul.Tensor`` converts its arguments through the dispatcher's boxed form;
``torch.mul`` calls the same overload at once. The code that runs uses these where they are known
to make the same call for every argument that the overload takes; dumps name the overload.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_SAME_NAME = (
    "abs.default",
    "add.Tensor",
    "addmm.default",
    "amax.default",
    "baddbmm.default",
    "bmm.default",
    "cat.default",
    "clone.default",
    "cos.default",
    "cumsum.default",
    "div.Tensor",
    "dropout.default",
    "embedding.default",
    "erf.default",
    "exp.default",
    "layer_norm.default",
    "log.default",
    "matmul.default",
    "mean.dim",
    "mm.default",
    "mul.Tensor",
    "neg.default",
    "permute.default",
    "pow.Tensor_Scalar",
    "relu.default",
    "reshape.default",
    "rsqrt.default",
    "select.int",
    "sigmoid.default",
    "sin.default",
    "softmax.int",
    "split_with_sizes.default",
    "sqrt.default",
    "squeeze.dim",
    "stack.default",
    "sub.Tensor",
    "sum.dim_IntList",
    "t.default",
    "tanh.default",
    "transpose.int",
    "unsqueeze.default",
    "where.self",
)
_OTHER_PLACES = {
    "contiguous.default": "torch.Tensor.contiguous",
    "expand.default": "torch.Tensor.expand",
    "gelu.default": "torch._C._nn.gelu",
    "linear.default": "torch._C._nn.linear",
    "scaled_dot_product_attention.default": "torch._C._nn.scaled_dot_product_attention",
    "silu.default": "torch._C._nn.silu",
    "view.default": "torch.Tensor.view",
}

NATIVE: Mapping[str, str] = {
    **{f"aten::{name}": f"torch.{name.partition('.')[0]}" for name in _SAME_NAME},
    **{f"aten::{name}": place for name, place in _OTHER_PLACES.items()},
}
"""Overload → torch's function, as Python text."""


def native_name(target: torch._ops.OpOverload) -> str | None:
    """Torch's function that makes the same call, as Python text; ``None``: none is known."""
    return NATIVE.get(f"{target._schema.name}.{target._overloadname}")
