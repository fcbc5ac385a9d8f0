"""The collectives of a process group, begun now and waited for later.

What records ops (compilers, tracers, dispatch modes) sees torch's functional collectives. Else the
group is called at once: the same messages, for half the time of a call on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

_c10d = torch.ops._c10d_functional
_wait = _c10d.wait_tensor.default
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names before torch 2.13, where they are deprecated."""

Finish = Callable[[], Tensor]
"""Waits for a collective and gives its result."""


@lru_cache
def plain_name(group: str) -> str:
    """The name that torch knows the group by."""
    return group.partition("@")[0]


def process_group(name: str) -> ProcessGroup:
    return distributed_c10d._resolve_process_group(plain_name(name))  # type: ignore[attr-defined,arg-type]


def all_reduce(x: Tensor, group: str, op: str = "sum", *, owned: bool = False) -> Finish:
    """``op``: "sum" or "max". ``owned``: nothing else holds ``x``, whose memory may be used."""
    if _is_recorded(x):
        return partial(_wait, _c10d.all_reduce.default(x, op, plain_name(group)))
    total = x if owned else x.clone(memory_format=torch.contiguous_format)
    kind = ReduceOp.SUM if op == "sum" else ReduceOp.MAX
    return partial(_finish, dist.all_reduce(total, kind, process_group(group), True), total)


def all_gather(x: Tensor, ranks: int, group: str) -> Finish:
    """``x`` [n, ...], contiguous, of each rank → [ranks * n, ...], rank after rank."""
    if _is_recorded(x):
        sent = _c10d.all_gather_into_tensor.default(x, ranks, plain_name(group))
        return partial(_wait, sent)
    whole = x.new_empty((ranks * x.size(0), *x.shape[1:]))
    return partial(_finish, _gather(whole, x, process_group(group), True), whole)


def reduce_scatter(x: Tensor, ranks: int, group: str) -> Finish:
    """``x`` [ranks * n, ...], contiguous, of each rank → the sum's [n, ...] of this rank."""
    if _is_recorded(x):
        sent = _c10d.reduce_scatter_tensor.default(x, "sum", ranks, plain_name(group))
        return partial(_wait, sent)
    part = x.new_empty((x.size(0) // ranks, *x.shape[1:]))
    return partial(_finish, _scatter(part, x, ReduceOp.SUM, process_group(group), True), part)


def all_to_all(
    x: Tensor, ranks: int, group: str, sizes: tuple[list[int], list[int]] | None = None
) -> Finish:
    """``x`` [n, ...], contiguous, of each rank → [m, ...]: the parts of ``x`` for this rank, rank
    after rank. ``sizes``: of the parts received and sent, if they are not all equal."""
    received, sent = sizes or ([x.size(0) // ranks] * ranks,) * 2
    if _is_recorded(x):
        given = _c10d.all_to_all_single.default(x, received, sent, plain_name(group))
        return partial(_wait, given)
    result = x.new_empty((sum(received), *x.shape[1:]))
    work = dist.all_to_all_single(result, x, received, sent, process_group(group), True)
    return partial(_finish, work, result)


def _is_recorded(x: Tensor) -> bool:
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return True
    return x.is_meta or torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def _finish(work: Any, result: Tensor) -> Tensor:
    work.wait()
    return result
