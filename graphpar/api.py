"""The public entry: :func:`transform`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from graphpar.collector import collector_paused
from graphpar.cost import CostModel, Hardware, Roofline, find_hardware
from graphpar.errors import InputError
from graphpar.mesh import check_tp, find_mesh
from graphpar.parallel_module import ParallelModule
from graphpar.passes.choose_recompute import parse_bytes
from graphpar.pipeline import Pipeline, default_pipeline
from graphpar.trace import Tracer, example_inputs
from graphpar.types import Type


def transform(
    model: nn.Module,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    tp: int,
    sp: bool = False,
    mesh: DeviceMesh | None = None,
    cost: CostModel | None = None,
    rng: str = "invariant",
    recompute: str = "auto",
    memory_budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    sparse_rnn: bool | str = "auto",
    overlap: bool = True,
    trace: str = "once",
) -> ParallelModule:
    """Partition an unmodified module over ``tp`` ranks.

    The result has the same signature, outputs, parameter names and gradients; each rank holds its
    part. ``model`` is left as it is. Under torchrun, or with torch.distributed initialised, the
    processes form groups of ``tp``; ``mesh`` names them instead (its dimension "tp"). Without
    enough processes the result can be read, printed and simulated, but not called.

    Args:
        model: the module; every rank must pass the same weights.
        example_args, example_kwargs: a call to trace. Default: the model's ``dummy_inputs``;
            without these, the first call is traced.
        tp: the number of tensor-parallel ranks.
        sp: sequence parallelism: the residual stream is sharded along the sequence (Korthikanti
            et al. 2022, section 4.2.2), else along the batch, where tp divides it.
        mesh: a DeviceMesh with a dimension "tp" of size ``tp``.
        cost: prices of ops and collectives, for the partitioner.
        rng: the masks of dropout. "invariant": a function of one number drawn per forward, the
            layer, the op and the element, so that they are the same for every ``tp``; backward
            makes them again. "exact": those of the unmodified model; each rank draws the whole
            mask. "per-rank": torch's own kernels, with a mask of its own on each rank where a
            value is sharded. For one rank the latter two change nothing. Other random ops, and
            dropout between the layers of ``nn.LSTM`` and its kin, run whole on every rank, with
            numbers that are the same on all of them.
        recompute: what backward runs again instead of keeping it. "none": nothing. "selective":
            the least kept bytes whose replay takes at most a twentieth of forward and backward.
            "full": all of every repeated block but its inputs (Korthikanti et al. 2022, section
            5, for both). "auto": as little as ``memory_budget`` asks for.
        memory_budget: bytes per device, or a text such as "40GiB", for parameters, gradients,
            AdamW's two moments, what autograd keeps and the largest replay. Default: the device's
            memory, of ``hardware`` or of the GPU that the model is on (then what fits in no way is
            a warning: the optimizer may be another); else there is no limit.
        hardware: the device whose times count for the choice ("a100-80gb"; see
            :data:`graphpar.cost.HARDWARE`). Default: an H100.
        sparse_rnn: recurrences (``nn.LSTM`` and its kin) whose recurrent weights hold zeros, as
            sparse ones: "auto", where a model of the time calls that faster at the density that
            the weights have now; True, all; False, none. ``report["sparse_rnn"]`` says what was
            decided for each layer and direction, and why.
        overlap: keep the shard of what is gathered for products, and gather it again in backward
            beside them; let other collectives of backward run beside products too, and sum the
            gradients of a block's small parameters by one of them.
        trace: "once": of repeated layers that run the same ops one is traced, in place of all of
            them. "flat": every layer is. The result is the same; ``report["trace"]`` says which
            layers were shared, and where others differ from them.

    Raises:
        InputError: an argument is wrong. TraceError: the model cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, ParallelModule):
        raise InputError("the model is already parallel: transform the original")
    if not isinstance(sp, bool):
        raise InputError(f"sp must be a bool, not {sp!r}")
    tp = check_tp(tp)
    device = None if hardware is None else find_hardware(hardware)
    budget = _budget(memory_budget, device, _device_of(model))

    def pipeline_of(
        types: Mapping[str, Type] | None, weights: Mapping[str, Tensor] | None
    ) -> Pipeline:
        return default_pipeline(
            tp=tp,
            sp=sp,
            cost=cost,
            rng=rng,
            recompute=recompute,
            budget_bytes=budget if recompute == "auto" else None,
            must_fit=memory_budget is not None or device is not None,
            times=None if device is None else Roofline(hardware=device),
            state_types=types,
            sparse_rnn=sparse_rnn,
            weights=weights,
            overlap=overlap,
        )

    pipeline_of(None, None)  # a wrong option is an error now, not at the first call

    tracer, ranks = Tracer(trace), find_mesh(mesh, tp, _device_of(model))
    with collector_paused():
        parallel = ParallelModule(model, pipeline_of, tp, ranks, tracer)
        call = _example(model, example_args, example_kwargs)
        if call is not None:
            parallel.prepare(*call)
    return parallel


def _budget(given: int | str | None, hardware: Hardware | None, device: torch.device) -> int | None:
    if given is not None:
        return parse_bytes(given)
    if hardware is not None:
        return hardware.memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _example(
    model: nn.Module, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    if args is None and kwargs is None:
        return example_inputs(model)
    if isinstance(args, torch.Tensor):
        raise InputError("example_args must be a tuple of arguments, not a tensor")
    return tuple(args or ()), dict(kwargs or {})
