"""The Program of a module: export, lower, fold, and put the pieces in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind
from torch.utils._pytree import TreeSpec

from graphpar.errors import InputError, InternalError
from graphpar.program import Program, State, placeholders, spec_of, tensor_spec
from graphpar.program import outputs as outputs_of
from graphpar.provenance import Source
from graphpar.snapshots import take_snapshots
from graphpar.trace import memory
from graphpar.trace.build import Builder, floating
from graphpar.trace.call import autocast_state, bind, flatten
from graphpar.trace.export import Exported, export
from graphpar.trace.finish import finish
from graphpar.trace.fold import Folding
from graphpar.trace.lower import Lowering
from graphpar.trace.memory import Ref, Storage
from graphpar.trace.norms import flatten_images
from graphpar.trace.where import forward_line, trace_error

MODES = ("once", "flat")


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "once",
) -> Program:
    """The forward of ``model`` on inputs like the given ones, as a flat functional Program.

    Only shapes, dtypes and devices of tensor inputs matter; other inputs are built in. Train or
    eval mode is as ``model`` is now, and ambient autocast is built in. The model is not changed.
    ``mode``: "once" traces layers that do the same once (:mod:`graphpar.trace.once`), "flat" every
    one; the result is the same. ``report["trace"]`` tells which layers differ, and where.

    Raises:
        InputError: the inputs do not fit the model's signature, or the mode is unknown.
        TraceError: the model cannot be traced; the user's line is in the notes.
    """
    args, kwargs = bind(model, args, kwargs)
    return lower(model, export(model, args, kwargs, once=is_once(mode)), args, kwargs)


def is_once(mode: str) -> bool:
    """Whether layers that do the same are traced once.

    Raises:
        InputError: an unknown mode.
    """
    if mode not in MODES:
        raise InputError(f"trace must be one of {', '.join(map(repr, MODES))}, not {mode!r}")
    return mode == "once"


def lower(
    model: nn.Module, exported: Exported, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Program:
    """The Program of what was exported for such a call; all its sizes are numbers."""
    with torch.inference_mode(False):
        return _lower(model, exported, *flatten(args, kwargs))


def _lower(model: nn.Module, exported: Exported, leaves: list[Any], in_spec: TreeSpec) -> Program:
    states = _states(model)
    tensors = _tensors(model)
    start = forward_line(model)

    builder = Builder(_fake_mode(exported))
    builder.source = start
    inputs, constants, refs = _inputs(builder, exported, leaves, states, tensors)
    lowering = Lowering(builder, inputs, autocast_state(), exported.runs)
    lowering.run(exported.graph.nodes)
    builder.source = start
    outputs = [
        memory.read(builder, lowering.env[v]) if isinstance(v, fx.Node) else v
        for v in outputs_of(exported.graph)
    ]
    mutated = [name for name in states if name in refs and refs[name].storage.version > 0]
    _check_apart(mutated, tensors, start)
    outputs += [builder.detach(memory.read(builder, refs[name])) for name in mutated]

    constants.update(builder.constants)
    known = {
        name: tensors[name]
        for name, state in states.items()
        if state.kind == "buffer" and not state.persistent and name not in mutated
    }
    builder.constants = constants
    outputs = Folding(builder, outputs, {**known, **constants}).run()
    held = finish(builder, outputs, start, states)
    flatten_images(builder.graph)
    # The spec is the node's: of a model on the meta device, constants have values all the same.
    for node in builder.graph.nodes:
        if node.op == "get_attr" and (name := str(node.target)) in held:
            states[name] = State("constant", tensor_spec(node), (name,), persistent=False)
    program = Program(
        graph=builder.graph,
        state=states,
        constants=held,
        in_spec=in_spec,
        out_spec=exported.out_spec,
        placeholders=tuple(builder.leaf[n] for n in placeholders(builder.graph)),
        mutations=tuple(mutated),
        report={"trace": exported.report},
    )
    return take_snapshots(program, every=False)


def _states(model: nn.Module) -> dict[str, State]:
    """All parameters and buffers by their first names."""
    names: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), []).append(name)
    fleeting = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    states: dict[str, State] = {}
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter, differentiable=parameter.requires_grad)
        states[name] = State("parameter", spec, tuple(names[id(parameter)]))
    for name, buffer in model.named_buffers():
        aliases = tuple(names[id(buffer)])
        if aliases[0] == name:
            persistent = not all(alias in fleeting for alias in aliases)
            states[name] = State("buffer", spec_of(buffer), aliases, persistent)
    return states


def _check_apart(mutated: list[str], tensors: Mapping[str, Tensor], source: Source) -> None:
    """What forward writes to must not lie within another parameter or buffer: a rank holds each of
    them by itself. The same tensor under two names is one."""

    def places(x: Tensor) -> range:
        """In bytes of the memory."""
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        start = x.storage_offset() * x.element_size()
        return range(start, start + (last + 1 if x.numel() else 0) * x.element_size())

    for name in mutated:
        mine = tensors[name]
        for other, theirs in tensors.items():
            same = mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata
            a, b = places(mine), places(theirs)
            if theirs is not mine and same and a.start < b.stop and b.start < a.stop:
                raise trace_error(
                    f"forward writes to the buffer {name}, which shares memory with {other}; "
                    "keep one of them, and take the part in forward",
                    source,
                )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _fake_mode(exported: Exported) -> Any:
    for node in exported.graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return None


def _inputs(
    builder: Builder,
    exported: Exported,
    leaves: list[Any],
    states: Mapping[str, State],
    tensors: Mapping[str, Tensor],
) -> tuple[dict[fx.Node, Any], dict[str, Tensor], dict[str, Ref]]:
    """A ref for each placeholder of the exported graph; constants; refs of states by name."""
    canonical = {alias: name for name, state in states.items() for alias in state.names}
    nodes = [n for n in exported.graph.nodes if n.op == "placeholder"]
    inputs: dict[fx.Node, Any] = {}
    constants: dict[str, Tensor] = {}
    refs: dict[str, Ref] = {}
    position = 0
    for node, spec in zip(nodes, exported.input_specs, strict=True):
        val = node.meta.get("val")
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(leaves[position], Tensor):
                made = builder.read("placeholder", f"{node.name}", val, floating(val))
                builder.facts[made].source = builder.source
                builder.leaf[made] = position
                inputs[node] = Ref(Storage("input", node.name, made))
            else:
                inputs[node] = leaves[position]
            position += 1
            continue
        target = str(spec.target)
        if spec.kind is InputKind.CONSTANT_TENSOR and target not in canonical:
            value = exported.constants[target]
            if value.requires_grad or target in exported.assigned:
                advice = (
                    "requires gradients but is not a parameter; register it as one"
                    if value.requires_grad
                    else "is replaced in its forward; register it as a buffer and write to that"
                )
                raise trace_error(f"the model's tensor {target} {advice}", builder.source)
            name, kind, grad = target, "constant", False
            constants[name] = value
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = canonical[target]
            kind = states[name].kind
            grad = states[name].spec.differentiable
        else:
            raise trace_error(
                f"the forward uses an object that cannot be traced ({target}): a "
                "torch.Generator, a scripted class, ...",
                builder.source,
            )
        if name not in refs:

            def make(name: str = name, val: Any = val, grad: bool = grad) -> fx.Node:
                return builder.read("get_attr", name, val, grad)

            refs[name] = Ref(Storage(kind, name, None, make))
        inputs[node] = refs[name]
    if position != len(leaves):
        raise InternalError(f"export has {position} inputs, the call {len(leaves)} leaves")
    return inputs, constants, refs
