"""Repeated layers traced once: what a layer does is compared with what one like it did.

The Python of every layer runs. While it calls the ops that a layer of its class called before
(:mod:`graphpar.trace.events`), none of them runs and none enters the exported graph: tensors that
look like the known results are handed out. A *run* node then stands for all of these calls, and
:class:`graphpar.trace.lower.Lowering` lowers each of them as it would have been. From the first
call that is another on, the layer is traced as any code is. So whatever a layer reads, writes or
calls, its graph is the one that tracing every layer gives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._export import utils as export_utils
from torch.export import _trace
from torch.fx.experimental import proxy_tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphpar.provenance import Source
from graphpar.trace.build import op_name
from graphpar.trace.events import (
    REGIONS,
    Root,
    Step,
    Unrecordable,
    place,
    state,
)
from graphpar.trace.layer import Layer
from graphpar.trace.parameters import quick_parameters
from graphpar.trace.patches import Patch, patched
from graphpar.trace.questions import Elsewhere, Functions, Questions
from graphpar.trace.repeated import repeated_modules
from graphpar.trace.report import LayerTrace

_LIBRARY = torch.library.Library("graphpar_trace", "FRAGMENT")
# Of an op with another tag, or none, the tracer keeps copies of the operands.
_LIBRARY.define("run(Tensor[] inputs, int number) -> Tensor[]", tags=(torch.Tag.flexible_layout,))
RUN = torch.ops.graphpar_trace.run.default
"""``run(inputs, number)`` in an exported graph: the calls of the run of that number."""


Runs = Mapping[int, tuple[Step, ...]]
"""The calls that each run node stands for, by its number."""


class Once:
    """Compares the calls of a model's layers while ``torch.export`` traces it."""

    def __init__(self, model: nn.Module) -> None:
        self.repeated = repeated_modules(model)
        self.called: set[int] = set()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.roots: dict[tuple[type, torch.device], Root] = {}
        self.events = fx.Graph()
        self.runs: dict[int, tuple[Step, ...]] = {}
        self.traces: list[LayerTrace] = []
        self.layer: Layer | None = None
        self.tracer: Any = None
        self.questions = Questions()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, exports share what their layers have in common."""
        tracer, mode = proxy_tensor._ModuleStackTracer, proxy_tensor.ProxyTorchDispatchMode
        patches: list[Patch] = [
            (tracer, "call_module", self._calls(tracer.call_module)),
            (tracer, "create_node", self._nodes(tracer.create_node)),
            (mode, "__torch_dispatch__", self._ops(mode.__torch_dispatch__)),
            quick_parameters(),
            # Graphs that are read, not run, and know all sizes, do without: a tenth of the time.
            (fx.GraphModule, "recompile", _nothing),
            (proxy_tensor, "_extract_tensor_metadata", _nothing),
            (_trace, "_replace_unbacked_bindings", _nothing),
            (export_utils, "insert_deferred_runtime_asserts", _nothing),
            (export_utils, "_insert_aten_to_metadata_assert_pass", _nothing),
        ]
        with patched(patches):
            yield

    def repeats(self, module: nn.Module) -> bool:
        """Whether the module looks like others, or was called before and holds none that do."""
        if id(module) in self.called and not any(id(m) in self.repeated for m in module.modules()):
            self.repeated.add(id(module))
        elif id(module) in self.names and next(module.children(), None) is not None:
            self.called.add(id(module))
        return id(module) in self.repeated

    def of(self, tracer: Any) -> Layer | None:
        """The layer that runs, if ``tracer`` is not another trace's within the export's."""
        return self.layer if self.layer is not None and self.layer.tracer is tracer else None

    # --- what torch.export calls ---

    def _calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_module(tracer: Any, module: nn.Module, *rest: Any) -> Any:
            if self.tracer is None:  # the whole model: outside of it nobody asks
                self.tracer = tracer
                with Elsewhere(self.questions):
                    return original(tracer, module, *rest)
            known = module
            if isinstance(module, proxy_tensor._AttrProxy):
                known = tracer.proxy_modules[module]
            within = self.layer is not None or tracer is not self.tracer
            if within or not self.repeats(known) or _modes_of_others():
                return original(tracer, module, *rest)
            kind = type(known)
            begin = kind, torch.get_default_device()
            trace = LayerTrace(self.names[id(known)], kind.__name__)
            root = self.roots.setdefault(begin, Root())
            self.layer = Layer(trace, tracer, root, self.questions.handed)
            self.traces.append(trace)
            try:
                with Functions(self.questions, self.layer):
                    result = original(tracer, module, *rest)
                self.stop_following()
                return result
            finally:
                self.layer = None

        return call_module

    def _nodes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
            layer = self.of(tracer)
            if args[1] in REGIONS and not (layer is not None and layer.busy):
                return self.region(layer, tracer, original, *args[:3])
            if layer is not None and not layer.busy:
                target = getattr(args[1], "__name__", str(args[1]))
                self.stop_following(f"{target} is no op on tensors")
                layer.recording = False
            node: fx.Node = original(tracer, *args, **kwargs)
            return node

        return create_node

    def _ops(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(
            mode: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            layer = self.of(mode.tracer)
            if layer is None or layer.busy or func is torch.ops.prim.device.default:
                return original(mode, func, types, args, kwargs)

            def run() -> Any:
                assert layer is not None
                layer.busy = True
                try:
                    return original(mode, func, types, args, kwargs)
                finally:
                    layer.busy = False

            return self.op(layer, func, args, kwargs or {}, run)

        return dispatch

    # --- what a layer calls ---

    def region(
        self,
        layer: Layer | None,
        tracer: Any,
        original: Callable[..., fx.Node],
        kind: str,
        target: Any,
        args: tuple[Any, ...],
    ) -> fx.Node:
        """A region begins or ends: the node of it, which what is followed has already."""
        # The end is given the node of the beginning, which may be one of the events'.
        plain = tuple(x for x in args if not isinstance(x, fx.Node))
        if layer is not None and (layer.following or layer.recording):
            layer.trace.ops += 1
            key = target, plain, state(), place()
            if layer.following:
                if (event := layer.at.next.get(key)) is not None:
                    layer.follow(event, ())
                    return event.node
                self.stop_following(self.difference(layer, target.__name__))
            if layer.recording:
                layer.enter(self.events, key, target, plain)
        own = tuple(
            None if isinstance(x, fx.Node) and x.graph is not tracer.graph else x for x in args
        )
        return original(tracer, kind, target, own, {})

    def op(
        self, layer: Layer, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        layer.trace.ops += 1
        if not (layer.following or layer.recording):
            return run()
        reader = layer.reader()
        try:
            whole = (reader.call(func, args, kwargs), state(), place())
        except Unrecordable as error:
            self.stop_following(f"{op_name(func)}: {error}")
            layer.recording = False
            return run()
        if layer.following:
            if (event := layer.at.next.get(whole)) is not None:
                return layer.follow(event, reader.operands)
            self.stop_following(self.difference(layer, op_name(func)))
        if not layer.recording:
            return run()
        return layer.record(self.events, whole, reader, run)

    def difference(self, layer: Layer, name: str) -> str | None:
        """Why the op of that name is not among those that may come next."""
        if not layer.at.next:
            return None if isinstance(layer.at, Root) else f"{name} comes after all ops"
        known = next(iter(layer.at.next.values()))
        layer.trace.like = layer.trace.like or known.layer
        at = f" at {Source(*lines[-1])}" if (lines := place()) else ""
        return f"{name}{at} is not as in {known.layer}"

    # --- the end of a run ---

    def stop_following(self, reason: str | None = None) -> None:
        """Put the run into the graph, and its values that are still in use."""
        layer = self.layer
        assert layer is not None
        if not layer.following:
            return
        layer.following = False
        layer.trace.reason = reason
        if not layer.steps:
            return
        layer.busy = True
        with (
            proxy_tensor.disable_proxy_modes_tracing(),
            torch._C.DisableTorchFunction(),
            mock.patch.object(self.tracer, "record_stack_traces", False),
        ):
            number = len(self.runs)
            inputs = [self.proxy_of(x) for x in layer.inputs]
            run = self.tracer.create_proxy("call_function", RUN, (inputs, number), {}, name="run")
            run.node.meta["val"] = None
            self.runs[number] = tuple(layer.steps)
            constant = layer.constants()
            for n, value in layer.alive():
                self.track(value, run, n, constant(value))
        layer.busy = False

    def proxy_of(self, value: Tensor) -> Any:
        slot = self.tracer.tensor_tracker.get(value)
        return value if slot is None else slot.proxy

    def track(self, value: Tensor, run: Any, number: int, constant: Tensor | None) -> None:
        made = self.tracer.tensor_tracker.get(value) is None
        if made and value.requires_grad and value.is_leaf:
            _leave_leaves(value)
        name = f"run_{number}"
        args = (run, number)
        item = self.tracer.create_proxy("call_function", operator.getitem, args, {}, name=name)
        proxy_tensor.track_tensor_tree(value, item, constant=constant, tracer=self.tracer)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a function."""


def _modes_of_others() -> bool:
    """Whether a mode is on that is not torch's: it may count how often it is asked."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return not all(type(m).__module__.startswith("torch.") or type(m) is Elsewhere for m in modes)


class _Computed(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, value: Tensor, start: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value


def _leave_leaves(value: Tensor) -> None:
    """Make ``value`` a tensor that was computed from one with a gradient, as it claims to be."""
    with torch._C._DisableTorchDispatch(), torch.enable_grad():
        start = torch.empty((), device="meta", requires_grad=True)
        value.requires_grad_(False)
        _Computed.apply(value, start)  # type: ignore[attr-defined]  # runs no op
