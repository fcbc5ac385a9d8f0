"""The kernels of one op's backward, by running it, and which ops have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from graphpar.cost.kernels import Kernel, KernelRecorder
from graphpar.program import TensorSpec, info, outputs


def backward_kernels(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    used: WeakIdKeyDictionary,
) -> tuple[Kernel, ...]:
    """What autograd runs between the gradients of an op's results and those of its operands.

    ``used`` are the tensors that an earlier op has read too, and gets these operands: a further
    gradient of a tensor is added to the others. Gradients come in their tensor's layout: copies of
    those that come in another are not seen.
    """
    operands: dict[int, tuple[Tensor, Tensor]] = {}

    def leaf(x: Tensor) -> Tensor:
        """Apart from all that leads to it, so that backward ends here."""
        if not x.requires_grad:
            return x
        return operands.setdefault(id(x), (x, x.detach().requires_grad_()))[1]

    args, kwargs = pytree.tree_map_only(Tensor, leaf, (args, kwargs))
    leaves = [mine for _, mine in operands.values()]
    results = pytree.tree_leaves(target(*args, **kwargs))
    made = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    made = [x for x in made if not any(x is mine for mine in leaves)]
    if not made or not leaves:
        return ()
    with KernelRecorder() as recorder:
        starts = [torch.empty_like(x) for x in made]
        found = torch.autograd.grad(made, leaves, starts, allow_unused=True)
        for (operand, _), grad in zip(operands.values(), found, strict=True):
            if grad is not None and operand in used:
                torch.add(grad, grad)
            used[operand] = None
    return tuple(recorder.kernels)


def loss_values(graph: fx.Graph) -> set[fx.Node]:
    """Where the backward of a root starts: at its outputs of one number, if any has a gradient, or
    at all that have one."""
    found = {value for value in outputs(graph) if isinstance(value, fx.Node)}
    specs = {value: info(value).spec for value in found}
    found = {v for v, s in specs.items() if isinstance(s, TensorSpec) and s.differentiable}
    return {v for v in found if specs[v].shape == ()} or found  # type: ignore[union-attr]


def leading_to(values: set[fx.Node]) -> set[fx.Node]:
    """The nodes that ``values`` follow from, and themselves."""
    found, stack = set(values), list(values)
    while stack:
        for before in stack.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                stack.append(before)
    return found
