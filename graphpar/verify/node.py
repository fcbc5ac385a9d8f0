"""What the checks share: a check of every node, and the error that names one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import fx

from graphpar.errors import VerifyError
from graphpar.ops import library as library  # defines torch.ops.graphpar
from graphpar.passes.rules import tensor_arguments
from graphpar.program import Program, info

_ops = torch.ops.graphpar
SEEDS = (_ops.draw_seed.default, _ops.call_seed.default)
SEEDED = (_ops.seeded_dropout.default, _ops.rank_dropout.default)

Check = Callable[[Program], None]


def failure(node: fx.Node, message: str) -> VerifyError:
    error = VerifyError(f"{message}\n  at {info(node).source}")
    error.add_note(f"node {node.format_node()}, made by {info(node).origin}")
    return error


def per_node(check: Callable[[Program, str, fx.Node], None]) -> Check:
    """Run the check on every node of every block and of the root; all that it raises names the
    node."""

    @wraps(check)
    def run(program: Program) -> None:
        for block, graph in program.graphs():
            for node in graph.nodes:
                try:
                    check(program, block, node)
                except VerifyError:
                    raise
                except Exception as error:
                    raise failure(node, f"{node.name}: {error or type(error).__name__}") from error

    return run


def is_op(node: fx.Node) -> bool:
    """Whether the node runs an op that the rules know, not one of graphpar's own."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_graphpar(node)


def is_graphpar(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "graphpar"


def operand_types(node: fx.Node) -> list[Any]:
    """The types of an op's tensor arguments."""
    return [info(n).type for n in tensor_arguments(node)]
