"""Run a Program on one device, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpar.errors import InternalError
from graphpar.ops.modes import autocast_off
from graphpar.program import Program, last_uses, outputs


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by their canonical names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run(program: Program, state: Mapping[str, Tensor], leaves: Sequence[Any]) -> list[Any]:
    """The flat outputs of ``program``, then the new values of its mutated buffers.

    ``state`` maps canonical names to tensors (constants come from the program); ``leaves`` are
    the flattened arguments of the call. A value is freed after its last use. Autocast is off
    within: the program holds its casts.
    """
    canonical = {alias: name for name, s in program.state.items() for alias in s.names}
    tensors = {**program.constants, **state}

    def read(name: str) -> Tensor:
        try:
            return tensors[canonical.get(name, name)]
        except KeyError:
            raise InternalError(f"the program reads {name}, which is not in the state") from None

    with autocast_off():
        return _run_graph(program, "", [leaves[i] for i in program.placeholders], read)


def _run_graph(
    program: Program, path: str, inputs: Sequence[Any], read: Callable[[str], Tensor]
) -> list[Any]:
    """The root (no path), or the block called at ``path``."""
    graph = program.blocks[program.calls[path]] if path else program.graph
    env: dict[fx.Node, Any] = {}
    free, last = iter(inputs), last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(free)
        elif node.op == "get_attr":
            env[node] = read(f"{path}.{node.target}" if path else str(node.target))
        elif node.op == "call_module":
            args = fx.map_arg(node.args, env.__getitem__)
            env[node] = _run_graph(program, str(node.target), args, read)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        else:
            break
        for done in last.get(node, ()):
            del env[done]
    return [env[v] if isinstance(v, fx.Node) else v for v in outputs(graph)]


class StateValues:
    """Values of a flat program's nodes that depend on state alone, as a mask times a weight does.

    ``weights``: by canonical names; what is missing or on the meta device is unknown.
    """

    def __init__(self, program: Program, weights: Mapping[str, Tensor]) -> None:
        self._program, self._weights = program, {**program.constants, **weights}

    def of(self, node: fx.Node) -> Tensor | None:
        """The value; ``None`` if it is unknown."""
        with torch.no_grad():
            found = self._value(node)
        return found if isinstance(found, Tensor) else None

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = self._weights.get(self._program.canonical(str(node.target)))
            return None if value is None or value.is_meta else value.detach()
        target: Any = node.target
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(
            target, "tags", ()
        ):
            return None
        inputs = {n: self._value(n) for n in node.all_input_nodes}
        if any(v is None for v in inputs.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        return target(*args, **kwargs)
