"""What a forward does that export would drop without a word.

Gradient hooks, seeds: numbers would be wrong, so they are errors. Functions with a backward of
their own become ops. Activation
checkpointing is lost too, but changes no number; changed attributes and Python's random numbers
are built in as they are: warnings.
"""

from __future__ import annotations

import logging
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.distributed._composable import checkpoint_activation
from torch.export import _trace
from torch.fx.experimental import proxy_tensor
from torch.fx.proxy import TracerBase
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint

from graphpar.trace.functions import FunctionRefused, apply_replaced, call_as_op
from graphpar.trace.patches import Patch, here, patched
from graphpar.trace.where import trace_error, user_frame, user_line

_SHAPES_LOG = logging.getLogger("torch.fx.experimental.symbolic_shapes")
_OWN_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_HOOK = "a gradient hook on a tensor inside the forward would be lost; hook parameters instead"
_GRADIENT = "a gradient is computed inside the forward, which graphpar cannot trace"
_SEED = "the random number generator is seeded inside the forward, which would be lost"


def _called_within() -> bool:
    """Whether torch or the tracer made the call that a :func:`patched` function answers."""
    return sys._getframe(3).f_code.co_filename.startswith(_OWN_ROOTS)


def _refused(owner: Any, name: str, message: str) -> Patch:
    """``owner.name`` raises, unless torch or the tracer calls it."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _called_within():
            return original(*args, **kwargs)
        raise trace_error(message, user_line(traceback.extract_stack()))

    return owner, name, call


class _Watch:
    def __init__(self, model: nn.Module, notice: Callable[[str], None]) -> None:
        self.modules = {id(module) for module in model.modules()}
        self.notice = notice

    def say(self, text: str) -> None:
        at = user_line(traceback.extract_stack())
        self.notice(f"{text}\n  at {at}" if at else text)

    def lost(self, message: str) -> Exception:
        return trace_error(message, user_line(traceback.extract_stack()))

    def checkpointing(self) -> list[Patch]:
        def nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
            self.checkpoint_dropped()
            yield

        name = "_checkpoint_without_reentrant_generator"
        return [(owner, name, nothing_around) for owner in (checkpoint, checkpoint_activation)]

    def checkpoint_dropped(self) -> None:
        self.say("the model's activation checkpointing is dropped: graphpar chooses its own")

    def function(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """``Function.apply`` as a trace should see it."""

        def call(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is checkpoint.CheckpointFunction:  # takes the function, a flag, its inputs
                self.checkpoint_dropped()
                return args[0](*args[2:])
            if cls is BackwardHookFunction:
                raise self.lost("a module's backward hook would be lost; hook parameters instead")
            if cls.__module__.startswith("torch._"):
                return apply(cls, *args, **kwargs)
            try:
                return call_as_op(cls, apply, args, kwargs)
            except FunctionRefused as error:
                raise self.lost(
                    f"the backward of {cls.__name__}, a torch.autograd.Function, would be lost "
                    f"({error}); use differentiable ops, or a torch.library.custom_op with "
                    "register_autograd"
                ) from error

        return call

    def attributes(self) -> list[Patch]:
        original = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            old = module.__dict__.get(name)
            plain = isinstance(value, (bool, int, float, str)) and type(value) is type(old)
            if id(module) in self.modules and plain and value != old and name != "training":
                self.say(f"the forward changes the attribute {name}: its value {old!r} is built in")
            original(module, name, value)

        return [(nn.Module, "__setattr__", set_attribute)]

    def gradient_mode(self) -> list[Patch]:
        """A call without gradients runs the program of one with them."""
        original = torch.is_grad_enabled

        def enabled() -> bool:
            answer = original()
            if answer and not _called_within():
                self.say(
                    "the forward asks whether gradients are enabled: that they are is built in"
                )
            return answer

        return [(torch, "is_grad_enabled", enabled)]

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Python's and NumPy's generators stay as they were."""
        states = random.getstate(), np.random.get_state(legacy=False)
        try:
            yield
        finally:
            now = random.getstate(), np.random.get_state(legacy=False)
            if repr(now) != repr(states):
                self.notice(
                    "the forward draws random numbers outside torch: the ones drawn are built in"
                )
                random.setstate(states[0])
                np.random.set_state(states[1])


def _inference_mode() -> list[Patch]:
    """Export does not see inference mode; it does see no_grad."""
    kind = torch.autograd.grad_mode.inference_mode
    outer: list[torch.no_grad] = []

    def enter(self: Any) -> None:
        outer.append(torch.no_grad())
        outer[-1].__enter__()

    def leave(self: Any, *error: Any) -> None:
        outer.pop().__exit__(*error)

    return [(kind, "__enter__", enter), (kind, "__exit__", leave)]


def _export_itself() -> list[Patch]:
    def unchanged(graph: Any, signature: Any) -> Any:
        return graph, signature

    keep_forwards = TracerBase._filter_traceback_frames

    def innermost(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        start = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        users = user_frame(frames[start:])
        if users is None:
            return keep_forwards(tracer, frames)
        return traceback.StackSummary.from_list([users])

    create_node, track = TracerBase.create_node, proxy_tensor.track_tensor_tree

    def without_trace(tracer: Any, kind: str, *rest: Any, **kwargs: Any) -> Any:
        outer = tracer.record_stack_traces
        tracer.record_stack_traces = outer and kind != "placeholder"
        try:
            return create_node(tracer, kind, *rest, **kwargs)
        finally:
            tracer.record_stack_traces = outer

    def tracked(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return track(*args, **kwargs)

    return [
        # A quarter of the time for each parameter: traces of the stack, which placeholders do not
        # need, and torch functions that only ask a tensor's shape, which three modes see.
        (TracerBase, "create_node", without_trace),
        (proxy_tensor, "track_tensor_tree", tracked),
        # Export keeps the frames of forwards; the user's line may be in a function they call.
        (TracerBase, "_filter_traceback_frames", innermost),
        # Prints the graph of a trace that failed.
        (_trace, "print", lambda *args, **kwargs: None),
        # As of torch 2.13 these lose a no_grad inside an autocast, and the like. Without them
        # gradient modes and autocast are single nodes of the exported graph.
        (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", unchanged),
        (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", unchanged),
    ]


@contextmanager
def watched(model: nn.Module, notice: Callable[[str], None]) -> Iterator[None]:
    """Within, a forward of ``model`` that does so raises TraceError, or calls ``notice``."""
    watch = _Watch(model, notice)
    patches = [
        *watch.checkpointing(),
        *watch.attributes(),
        *watch.gradient_mode(),
        *_inference_mode(),
        *_export_itself(),
        _refused(torch.Tensor, "register_hook", _HOOK),
        _refused(torch.Tensor, "backward", _GRADIENT),
        _refused(torch.autograd, "grad", _GRADIENT),
        _refused(torch.autograd, "backward", _GRADIENT),
        _refused(torch, "manual_seed", _SEED),
        _refused(torch, "set_rng_state", _SEED),
        _refused(torch.random, "fork_rng", _SEED),
    ]
    level = _SHAPES_LOG.level
    _SHAPES_LOG.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            stack.enter_context(patched(patches))
            stack.enter_context(apply_replaced(lambda apply: here(apply, watch.function(apply))))
            stack.enter_context(watch.random_numbers())
            yield
    finally:
        _SHAPES_LOG.setLevel(level)
