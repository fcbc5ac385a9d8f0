"""The kernels that run under a dispatch mode: their FLOPs, bytes and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "set_"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
TILE = 256, 128
_DRAWS = {"bernoulli", "bernoulli_", "native_dropout", "rand", "rand_like", "randn", "randn_like"}
_DRAWS |= {"dropout_mask", "dropout_bits", "uniform_", "normal_", "exponential_"}
_BY_FORM = {"dropout_bits", "dropout_mask"}
_LOOKUPS = {"embedding", "index_select", "gather", "index", "take"}


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch has a formula for the CUDA kernel of the same arithmetic, none for this one."""
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel on one rank, or one collective.

    ``bytes_moved`` is what it reads and writes of memory, ``tiles`` how many a matrix product's
    result consists of. ``draws`` are the numbers that it takes from the device's generator, and
    ``masks`` those that it makes of a counter (:mod:`graphpar.ops.philox`). A collective has its
    name, the number of ``ranks``, their distance (``stride``), the bytes of the whole tensor, and
    how many of the kernels that follow run before it is waited for (``overlaps``).
    """

    op: str
    dtype: torch.dtype = torch.float32
    flops: int = 0
    bytes_moved: int = 0
    tiles: int = 0
    draws: int = 0
    masks: int = 0
    collective: str = ""
    ranks: int = 1
    stride: int = 1
    whole_bytes: int = 0
    overlaps: int = 0


def touched_bytes(x: Tensor) -> int:
    """Bytes of the elements that ``x`` covers: a dimension of stride 0 counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * x.element_size()


class KernelRecorder(TorchDispatchMode):
    """Appends a :class:`Kernel` to ``kernels`` for every op that computes or communicates.

    Views and allocations are none. FLOPs are those of torch's FlopCounterMode. A lookup reads the
    rows that it returns, not the table; what makes a tensor like another one reads nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._pending: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = call(func, args, kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._wait(args[0])
        kernel = kernel_of(func, args, kwargs, result)
        if kernel is not None:
            if kernel.collective:
                self._pending[result.untyped_storage()._cdata] = len(self.kernels)
            self.kernels.append(kernel)
        return result

    def _wait(self, x: Tensor) -> None:
        place = self._pending.pop(x.untyped_storage()._cdata, None)
        if place is not None:
            behind = len(self.kernels) - 1 - place
            self.kernels[place] = replace(self.kernels[place], overlaps=behind)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's result; where torch's fake kernel gives other memory than the real one, the real
    one's."""
    if func is torch.ops._c10d_functional.wait_tensor.default and _has_no_values(args[0]):
        return args[0]
    result = func(*args, **kwargs)
    if func is aten.mkldnn_rnn_layer.default:
        return (*result[:3], _workspace(result[3], args))
    if func is aten.convolution_backward.default:
        return tuple(x if wanted else None for x, wanted in zip(result, args[-1], strict=True))
    return result


def _has_no_values(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def _workspace(workspace: Tensor, args: tuple[Any, ...]) -> Tensor:
    """The workspace of oneDNN's LSTM, whose size torch's fake kernel leaves at 0."""
    forms = [(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else _frozen(a) for a in args]
    return workspace.new_empty(_workspace_bytes(tuple(forms)))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=64)
def _workspace_bytes(forms: tuple[Any, ...]) -> int:
    """Measured, by running the layer on zeros."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.enable_grad():
        args = [
            torch.zeros(f[0], dtype=f[1], requires_grad=True)
            if isinstance(f, tuple) and f and isinstance(f[0], tuple)
            else f
            for f in forms
        ]
        workspace: Tensor = aten.mkldnn_rnn_layer.default(*args)[3]
        return workspace.numel()


def kernel_of(func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
    """What one call of a low-level op costs; ``None`` if it moves nothing."""
    space, _, name = func._schema.name.partition("::")
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    if not made or name in _ALLOCATIONS or name in ("wait_tensor", "draw_seed", "call_seed"):
        return None
    label = f"{space}.{name}"
    if space == "_c10d_functional" and name in _COLLECTIVES:
        whole = max(x.nbytes for x in (*given, *made))
        ranks = _group_size(args[-1])
        return Kernel(op=label, collective=_COLLECTIVES[name], ranks=ranks, whole_bytes=whole)
    known = {x.untyped_storage()._cdata for x in given}
    fresh = [x for x in made if x.untyped_storage()._cdata not in known]
    if not fresh and not func._schema.is_mutable:
        return None
    written = sum(map(touched_bytes, fresh or made[:1]))
    read = sum(map(touched_bytes, given))
    if name in _BY_FORM or name.endswith("_like"):
        read = 0
    if name in _LOOKUPS:
        read = written + sum(touched_bytes(x) for x in given if not x.is_floating_point())
    formula = flop_registry.get(func._overloadpacket) or _MORE_FLOPS.get(func._overloadpacket)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    dtype = next((x.dtype for x in given if x.is_floating_point()), made[0].dtype)
    tiles = _tiles(made[0]) if name in _PRODUCTS else 0
    return Kernel(
        op=label,
        dtype=dtype,
        flops=flops,
        bytes_moved=read + written,
        tiles=tiles,
        draws=made[0].numel() if name in _DRAWS else 0,
        masks=made[0].numel() if label == "graphpar.dropout_part" else 0,
    )


def _tiles(product: Tensor) -> int:
    """The tiles of matrices [..., m, n], the better way round."""
    *batch, m, n = product.shape
    ways = (TILE, TILE[::-1])
    return math.prod(batch) * min(-(-m // rows) * -(-n // columns) for rows, columns in ways)


def _group_size(name: str) -> int:
    size: int = torch.distributed.distributed_c10d._resolve_process_group(name).size()  # type: ignore[attr-defined,arg-type]
    return size
