"""Run a Program on one device, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpar.errors import InternalError
from graphpar.program import Program, outputs


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by their canonical names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run(program: Program, state: Mapping[str, Tensor], leaves: Sequence[Any]) -> list[Any]:
    """The flat outputs of ``program``, then the new values of its mutated buffers.

    ``state`` maps canonical names to tensors (constants come from the program), ``leaves`` are
    the flattened arguments of the call. Every value is freed after its last use. Autocast is
    off: the program holds its casts.
    """
    names = {alias: name for name, s in program.state.items() for alias in s.names}
    tensors = {**program.constants, **state}

    def read(path: str) -> Tensor:
        try:
            return tensors[names.get(path, path)]
        except KeyError:
            raise InternalError(f"the program reads {path}, which is not in the state") from None

    def call(graph: fx.Graph, prefix: str, inputs: Sequence[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        free = iter(inputs)
        last = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                return [env[v] if isinstance(v, fx.Node) else v for v in outputs(graph)]
            if node.op == "placeholder":
                env[node] = next(free)
            elif node.op == "get_attr":
                env[node] = read(f"{prefix}{node.target}")
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                if node.op == "call_module":
                    path = str(node.target)
                    block = program.blocks[program.calls[path]]
                    result = call(block, f"{path}.", args)
                    env[node] = result
                else:
                    env[node] = node.target(*args, **kwargs)
            for done in last.get(node, ()):
                del env[done]
        raise InternalError("the graph has no output node")

    with _no_autocast():
        return call(program.graph, "", [leaves[i] for i in program.placeholders])


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, those whose values nobody needs after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in (node, *node.all_input_nodes):
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def _no_autocast() -> Any:
    from contextlib import ExitStack

    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
