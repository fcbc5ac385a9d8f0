"""The collectives of a process group, begun now and waited for later.

What records ops (compilers, tracers, dispatch modes) sees torch's functional collectives. Else the
methods of the group are called, which the functions of ``torch.distributed`` end in: the same
messages, without a dozen Python calls before each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

_c10d = torch.ops._c10d_functional
_wait = _c10d.wait_tensor.default
_GATHER, _SCATTER, _EXCHANGE = (
    ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    if hasattr(ProcessGroup, "all_gather_single")
    else ("_allgather_base", "_reduce_scatter_base", "alltoall_base")  # before torch 2.13
)
_resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]

Finish = Callable[[], Tensor]
"""Waits for a collective and gives its result."""


def _asynchronous(options: Any, reduction: Any = None) -> Any:
    options.asyncOp = True
    if reduction is not None:
        options.reduceOp = reduction
    return options


_TO_GATHER = _asynchronous(distributed_c10d.AllgatherOptions())  # type: ignore[attr-defined]
_TO_EXCHANGE = _asynchronous(distributed_c10d.AllToAllOptions())
_TO_SCATTER = _asynchronous(distributed_c10d.ReduceScatterOptions(), ReduceOp.SUM)
_TO_REDUCE = {
    "sum": _asynchronous(distributed_c10d.AllreduceOptions(), ReduceOp.SUM),
    "max": _asynchronous(distributed_c10d.AllreduceOptions(), ReduceOp.MAX),
}


@lru_cache
def plain_name(group: str) -> str:
    """The name that torch knows the group by."""
    return group.partition("@")[0]


def process_group(name: str) -> ProcessGroup:
    return _resolve(plain_name(name))  # type: ignore[no-any-return]


def all_reduce(x: Tensor, group: str, op: str = "sum", *, owned: bool = False) -> Finish:
    """``op``: "sum" or "max". ``owned``: nothing else holds ``x``, whose memory may be used."""
    if is_recorded(x):
        return partial(_wait, _c10d.all_reduce.default(x, op, plain_name(group)))
    total = x if owned else x.clone(memory_format=torch.contiguous_format)
    work = process_group(group).allreduce([_real(total)], _TO_REDUCE[op])
    return partial(_finish, work, total)


def all_gather(x: Tensor, group: str, found: ProcessGroup) -> Finish:
    """``x`` [n, ...], contiguous, of each rank → [ranks * n, ...], rank after rank. ``found`` is
    the group of that name."""
    if is_recorded(x):
        sent = _c10d.all_gather_into_tensor.default(x, found.size(), plain_name(group))
        return partial(_wait, sent)
    size, *rest = x.shape
    whole = x.new_empty((found.size() * size, *rest))
    begin = getattr(found, _GATHER)
    return partial(_finish, begin(_real(whole), _real(x), _TO_GATHER), whole)


def reduce_scatter(x: Tensor, group: str, found: ProcessGroup) -> Finish:
    """``x`` [ranks * n, ...], contiguous, of each rank → the sum's [n, ...] of this rank."""
    if is_recorded(x):
        name = plain_name(group)
        sent = _c10d.reduce_scatter_tensor.default(x, "sum", found.size(), name)
        return partial(_wait, sent)
    size, *rest = x.shape
    part = x.new_empty((size // found.size(), *rest))
    begin = getattr(found, _SCATTER)
    return partial(_finish, begin(_real(part), _real(x), _TO_SCATTER), part)


def all_to_all(
    x: Tensor,
    group: str,
    found: ProcessGroup,
    sizes: tuple[list[int], list[int]] | None = None,
) -> Finish:
    """``x`` [n, ...], contiguous, of each rank → [m, ...]: the parts of ``x`` for this rank, rank
    after rank. ``sizes``: of the parts received and sent, if they are not all equal."""
    if is_recorded(x):
        received, sent = sizes or ([x.size(0) // found.size()] * found.size(),) * 2
        given = _c10d.all_to_all_single.default(x, received, sent, plain_name(group))
        return partial(_wait, given)
    if sizes is None:  # torch's form for equal parts
        received, sent, result = [], [], torch.empty_like(x)
    else:
        received, sent = sizes
        result = x.new_empty((sum(received), *x.shape[1:]))
    begin = getattr(found, _EXCHANGE)
    return partial(_finish, begin(_real(result), _real(x), received, sent, _TO_EXCHANGE), result)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def is_recorded(x: Tensor) -> bool:
    """Whether something records the ops that are called with ``x``."""
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return True
    return x.is_meta or torch._C._len_torch_dispatch_stack() > 0


def _finish(work: Any, result: Tensor) -> Tensor:
    work.wait()
    return result
