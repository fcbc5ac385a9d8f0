"""One walk over the exported graph that builds the flat functional graph.

Autocast becomes casts, in-place ops become values, idle ops disappear, and what is used where
gradients are off is detached.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.amp import autocast_mode

from graphpar.provenance import source_of
from graphpar.trace import composite, memory
from graphpar.trace.autocast import Autocast
from graphpar.trace.build import Builder, Call, argument, aten
from graphpar.trace.composite import is_composite
from graphpar.trace.functionalize import changes_view, fit, value_written, view_of, written
from graphpar.trace.memory import Ref, Step
from graphpar.trace.once import RUN, Runs
from graphpar.trace.simplify import idle_dropout, simplify
from graphpar.trace.where import trace_error

_CHECKS = {
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_functional_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}
# Their results are contiguous; their meta functions say that they follow the targets' strides.
_CONTIGUOUS = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default}
# In torch 2.11 an export says that their states have a dimension more than they have.
_RECURRENCES = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
_TRAINING: dict[Any, str] = {
    aten.batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
}
_BY_VALUE = (
    "depends on the values of tensors; compute with tensors instead (torch.where, masks, padding), "
    "or take the decision outside the model"
)


@dataclass(slots=True)
class Several:
    """The outputs of an op with several. ``step``, if they are views of ``parent``."""

    node: fx.Node
    parent: Ref | None
    step: Step | None
    refs: dict[int, Ref] = field(default_factory=dict)


def module_path(node: fx.Node) -> str:
    """The innermost module call: its path, with ``@n`` for the n-th repeated call of a module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    key, (path, _) = next(reversed(stack.items()))
    _, at, repeat = key.rpartition("@")
    return f"{path}@{repeat}" if at and repeat.isdigit() else str(path)


def updates_statistics(node: fx.Node) -> bool:
    """Whether the node writes running statistics, which the schemas of norms do not say."""
    name = _TRAINING.get(node.target)
    if name is None:
        return False
    call = (node.target, node.args, node.kwargs)
    return bool(argument(call, name)) and argument(call, "running_mean") is not None


def _casts_operand(part: fx.Node) -> bool:
    return (
        part.target is aten._to_copy.default
        and part.args[0].op == "placeholder"  # type: ignore[union-attr]
        and set(part.kwargs) == {"dtype"}
    )


def _same_memory(a: Any, b: Tensor) -> bool:
    return (
        isinstance(a, Tensor)
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )


def _unsupported(target: Any) -> str:
    if isinstance(target, HigherOrderOperator):
        return f"control flow ({target}) {_BY_VALUE}"
    if getattr(target, "__module__", "") in ("_operator", "math", "builtins"):
        return f"a number computed by {target.__name__} {_BY_VALUE}"
    return (
        f"{getattr(target, '__name__', target)} cannot be traced (is this a torch.func transform?)"
    )


class Lowering:
    """``env`` holds a ref, the outputs of an op with several, or a Python value for each node."""

    def __init__(
        self,
        builder: Builder,
        inputs: Mapping[fx.Node, Any],
        ambient: Sequence[tuple[str, torch.dtype]] = (),
        runs: Runs | None = None,
    ) -> None:
        self.b = builder
        self.env: dict[fx.Node, Any] = dict(inputs)
        self.autocast = Autocast(builder, ambient)
        self.runs: Runs = runs or {}
        self.grad_mode = True
        self.writes = False
        self.around = builder.source

    def run(self, nodes: Iterable[fx.Node]) -> None:
        """Lower the calls among ``nodes``."""
        calls = [n for n in nodes if n.op == "call_function"]
        shared = {step.event.node for steps in self.runs.values() for step in steps}
        self.writes = any(written(n.target) or updates_statistics(n) for n in {*calls, *shared})
        self.around = self.b.source
        for node in calls:
            if node.target is RUN:
                self.env[node] = self.run_steps(node)
            else:
                self.at(node, module_path(node))
                self.call(node)

    def at(self, node: fx.Node, module: str) -> None:
        """Take the source of ``node``, in a call of ``module``."""
        source = source_of(node.meta.get("stack_trace"), module)
        # What a hook of the root computes has no frame.
        self.b.source = source if source.line else replace(self.around, module=module)

    def run_steps(self, run: fx.Node) -> list[Any]:
        """Lower the calls that ``run`` stands for; their values in order."""
        inputs: list[fx.Node] = run.args[0]  # type: ignore[assignment]
        values: list[Any] = []
        for step in self.runs[run.args[1]]:  # type: ignore[index]
            event = step.event
            for operand, (inner, place) in zip(event.operands, step.operands, strict=True):
                self.env[operand] = values[place] if inner else self.env[inputs[place]]
            self.at(event.node, step.module)
            self.call(event.node)
            found = self.env.get(event.node)  # a region's has none
            for result in event.results:
                at = result.place
                values.append(found if at is None else self.getitem(found, at))
        return values

    def call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self.env[node] = self.getitem(self.env[node.args[0]], node.args[1])  # type: ignore[index, arg-type]
        elif target is torch._C._set_grad_enabled:
            self.grad_mode = bool(node.args[0])
        elif target is autocast_mode._enter_autocast:
            device, dtype, enabled, *_ = node.args
            self.autocast.enter(str(device), dtype, bool(enabled))  # type: ignore[arg-type]
        elif target is autocast_mode._exit_autocast:
            self.autocast.exit()
        elif not isinstance(target, OpOverload):
            raise trace_error(_unsupported(target), self.b.source)
        elif target._schema.name.split("::")[1] in _CHECKS:
            pass
        elif target is aten.broadcast_tensors.default:
            self.env[node] = self.broadcast(node)
        elif written(target):
            self.env[node] = self.in_place(node, target)
        elif updates_statistics(node):
            self.env[node] = self.batch_norm(node)
        else:
            self.env[node] = self.op(node, target)

    def getitem(self, value: Any, index: int) -> Any:
        if not isinstance(value, Several):
            return value[index]
        if index not in value.refs:
            item = self.b.item(value.node, index)
            if value.parent is None or value.step is None:
                value.refs[index] = memory.base(item)
            else:
                step = replace(value.step, index=index)
                value.refs[index] = memory.view(value.parent, step, item)
        return value.refs[index]

    def value(self, node: fx.Node) -> Any:
        """The present node of an argument, detached where gradients are off."""
        found = self.env[node]
        if isinstance(found, Several):
            return found.node
        if not isinstance(found, Ref):
            return found
        value = memory.read(self.b, found)
        return value if self.grad_mode else self.b.detach(value)

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return fx.map_arg(node.args, self.value), fx.map_arg(node.kwargs, self.value)

    def op(self, node: fx.Node, target: OpOverload) -> Any:
        val = node.meta["val"]
        self.check_static(target, val)
        if target in _CONTIGUOUS:
            with self.b.fake():
                val = val.contiguous()
        if target in _RECURRENCES:
            traced, val = val, self.run_fake(node, target)
            wrong = [
                i for i, (a, b) in enumerate(zip(traced, val, strict=True)) if a.shape != b.shape
            ]
            if any(user.args[1] in wrong and user.users for user in node.users):
                raise trace_error(
                    f"torch {torch.__version__} gives {target} states of a wrong shape",
                    self.b.source,
                )
        if (same := self.returned(node, target, val)) is not None:
            return self.env[same]
        if is_composite(target) and (found := self.parts(node, target)) is not None:
            return found
        call = self.autocast.cast((target, *self.arguments(node)))
        return self.emit(call, val, self.viewed(node, target, val) if self.writes else None)

    def emit(self, call: Call, val: Any, parent: Ref | None) -> Any:
        """The plain spelling of ``call``; its result is a view if it has a ``parent``."""
        simple = simplify(self.b, call, val)
        step = None
        if isinstance(simple, fx.Node):
            new = simple
        else:
            new = self.b.emit(*simple, val=val)
            if parent is not None:
                op, args, kwargs = simple
                step = Step(op, args[1:], kwargs, self.b.source, no_grad=not self.grad_mode)
        if not isinstance(val, Tensor):
            return Several(new, parent, step)
        return memory.base(new) if parent is None else memory.view(parent, step, new)

    def parts(self, node: fx.Node, target: OpOverload) -> Any:
        """The results of a composite op, made of its parts; autocast's casts are among them."""
        found = composite.parts(node, target, [self.b.fake(), *self.autocast.contexts()])
        if found is None:
            return None
        graph, operands = found
        self.env |= {
            p: self.env[n]
            for p, n in zip(graph.find_nodes(op="placeholder"), operands, strict=True)
        }
        autocast, self.autocast = self.autocast, Autocast(self.b, ())
        writes, self.writes = self.writes, True
        for part in graph.nodes:
            if autocast.enabled and _casts_operand(part):
                cast = autocast.cast_node(self.value(part.args[0]), part.meta["val"].dtype)
                self.env[part] = memory.base(cast)
            elif part.op == "call_function":
                self.call(part)
        self.autocast, self.writes = autocast, writes
        return fx.map_arg(graph.output_node().args[0], self.env.__getitem__)

    def broadcast(self, node: fx.Node) -> list[Ref]:
        """``broadcast_tensors``: each tensor expanded; one of the full shape is itself."""
        found: list[Ref] = []
        for x, val in zip(node.args[0], node.meta["val"], strict=True):  # type: ignore[arg-type]
            if x.meta["val"].shape == val.shape:
                found.append(self.env[x])
                continue
            call: Call = (aten.expand.default, (self.value(x), list(val.shape)), {})
            found.append(self.emit(call, val, self.env[x] if self.writes else None))
        return found

    def returned(self, node: fx.Node, target: OpOverload, val: Any) -> fx.Node | None:
        """The argument that the op returns as it is: ``y.float()`` of a float ``y`` is ``y``.

        Export takes such a result for the newer name of ``y``, also after a ``no_grad`` region
        that only looked at it: detaching it there would cut the gradient of ``y``.
        """
        if not isinstance(val, Tensor) or (self.grad_mode and not self.writes):
            return None
        if idle_dropout((target, node.args, node.kwargs)):
            return node.args[0]  # type: ignore[return-value]
        alike = [n for n in node.all_input_nodes if _same_memory(n.meta.get("val"), val)]
        if not alike:
            return None
        result = self.run_fake(node, target)
        return next((n for n in alike if n.meta["val"] is result), None)

    def run_fake(self, node: fx.Node, target: OpOverload) -> Any:
        """What the op gives for fake values like those of the export."""
        with torch.no_grad(), self.b.fake():
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            return target(*args, **kwargs)

    def check_static(self, target: OpOverload, val: Any) -> None:
        """No shape or number may depend on the values of tensors."""
        for v in val if isinstance(val, (tuple, list)) else [val]:
            if isinstance(v, Tensor) and v.layout is not torch.strided:
                raise trace_error(f"{target}: sparse tensors are not supported", self.b.source)
            if isinstance(v, Tensor) and all(isinstance(size, int) for size in v.shape):
                continue
            if v is not None:
                raise trace_error(
                    f"a shape or number that {target} computes {_BY_VALUE}", self.b.source
                )

    def viewed(self, node: fx.Node, target: OpOverload, val: Any) -> Ref | None:
        """The tensor whose memory the result shares."""
        returns = target._schema.returns
        may = bool(returns) and returns[0].alias_info is not None
        if not may and torch.Tag.maybe_aliasing_or_mutating not in target.tags:
            return None
        shown = val if isinstance(val, Tensor) else next(iter(val), None)
        first = node.args[0]
        if (
            shown is None
            or not isinstance(first, fx.Node)
            or target is aten.lift_fresh_copy.default
        ):
            return None
        whole = first.meta["val"].untyped_storage()._cdata
        return self.env[first] if shown.untyped_storage()._cdata == whole else None

    def in_place(self, node: fx.Node, target: OpOverload) -> Any:
        names = [target._schema.arguments[i].name for i in written(target)]
        targets = [argument((target, node.args, node.kwargs), name) for name in names]
        refs = [self.env[t] for t in targets if isinstance(t, fx.Node)]
        if len(refs) != len(names) or not all(isinstance(ref, Ref) for ref in refs):
            raise trace_error(f"{target} writes to a list of tensors: not supported", self.b.source)
        if changes_view(target):
            return self.in_place_view(node, target, refs[0])
        olds = [memory.read(self.b, ref) for ref in refs]
        for ref, old in zip(refs, olds, strict=True):
            self.check_writable(target, ref, old)
        news = value_written(self.b, (target, *self.arguments(node)))  # never under autocast
        for ref, old, new in zip(refs, olds, news, strict=True):
            memory.write(self.b, ref, fit(self.b, new, old))
        return refs[0] if len(refs) == 1 else refs

    def in_place_view(self, node: fx.Node, target: OpOverload, ref: Ref) -> Ref:
        """``squeeze_`` and the like: the name now stands for a view of what it stood for."""
        old = memory.read(self.b, ref)
        if target is aten.detach_.default and not self.b.grad(old):
            return ref
        if target is aten.detach_.default and ref.parent is None and not ref.storage.views:
            memory.write(self.b, ref, self.b.detach(old))
            return ref
        found = view_of(target)
        if found is None:
            raise trace_error(f"{target} of this tensor is not supported", self.b.source)
        step = Step(found, node.args[1:], dict(node.kwargs), self.b.source)
        new = memory.view(ref, step, self.b.emit(found, (old, *step.args), step.kwargs))
        for key, value in self.env.items():
            if value is ref:
                self.env[key] = new
        return new

    def check_writable(self, target: Any, ref: Ref, old: fx.Node) -> None:
        kind, name = ref.storage.kind, ref.storage.name
        advice = {
            "input": f"the model's input {name}; let it write to a clone",
            "parameter": f"the parameter {name}; change parameters outside the forward",
            "constant": f"the tensor {name}; register it as a buffer",
        }
        if kind in advice:
            raise trace_error(f"{target} writes to {advice[kind]}", self.b.source)
        if not self.grad_mode and self.b.grad(old):
            raise trace_error(
                f"{target} writes, where gradients are off, to a tensor that has them; "
                "let it write to a clone",
                self.b.source,
            )

    def batch_norm(self, node: fx.Node) -> Ref:
        call = (node.target, node.args, node.kwargs)
        if node.target is not aten.batch_norm.default:
            raise trace_error(
                f"{node.target} with running statistics is not supported; "
                "use track_running_stats=False",
                self.b.source,
            )
        refs = [self.env[argument(call, f"running_{name}")] for name in ("mean", "var")]
        for ref in refs:
            self.check_writable(node.target, ref, memory.read(self.b, ref))
        _, args, _ = self.autocast.cast((node.target, *self.arguments(node)))
        # Copies, for autograd keeps the old statistics, and they are written before the backward.
        stats = [self.b.emit(aten.clone.default, (stat,)) for stat in args[3:5]]
        args = (*args[:3], *stats, *args[5:])
        new = self.b.emit(aten._native_batch_norm_legit_functional.default, args[:8])
        for ref, index in zip(refs, (3, 4), strict=True):
            memory.write(self.b, ref, self.b.item(new, index))
        return memory.base(self.b.item(new, 0))
