"""Parts of a program's root: their state, and a part as a program of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from graphpar.cost.backward import loss_values
from graphpar.program import Program, info, is_tensor, output_node, set_info


def state_read(program: Program, nodes: Iterable[fx.Node]) -> set[str]:
    """The canonical names of the state that nodes of the root read, in called blocks too."""
    found = set()
    for node in nodes:
        found |= {str(n.target) for n in node.all_input_nodes if n.op == "get_attr"}
        if node.op == "call_module":
            path = str(node.target)
            block = program.blocks[program.calls[path]]
            found |= {f"{path}.{n.target}" for n in block.nodes if n.op == "get_attr"}
    return {program.canonical(name) for name in found}


def part_of(program: Program, nodes: Sequence[fx.Node]) -> Program:
    """The program of these nodes of the root alone.

    What they read of others are its inputs, what others read of them and the loss its outputs.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = set(nodes)

    def copy(node: fx.Node) -> None:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].name = node.name
        set_info(made[node], info(node))

    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    for node in outside:
        if node.op != "get_attr":
            made[node] = graph.create_node("placeholder", node.name, name=node.name)
            set_info(made[node], info(node))
    for node in outside:
        if node.op == "get_attr":
            copy(node)
    for node in nodes:
        copy(node)
    end, losses = output_node(program.graph), loss_values(program.graph)
    left = [
        node
        for node in nodes
        if is_tensor(node)
        and (node in losses or any(u not in inside and u is not end for u in node.users))
    ]
    set_info(graph.output([made[node] for node in left]), info(end))
    names = state_read(program, nodes)
    paths = {str(node.target) for node in nodes if node.op == "call_module"}
    calls = {path: block for path, block in program.calls.items() if path in paths}
    return replace(
        program,
        graph=graph,
        state={name: program.state[name] for name in program.state if name in names},
        constants={name: x for name, x in program.constants.items() if name in names},
        blocks={block: program.blocks[block] for block in dict.fromkeys(calls.values())},
        calls=calls,
        mutations=(),
        placeholders=tuple(range(sum(n.op == "placeholder" for n in graph.nodes))),
    )
