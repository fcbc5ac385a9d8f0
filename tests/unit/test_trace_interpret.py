"""The interpreter, on a program with a block that two module paths share."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from graphpar.errors import InternalError
from graphpar.interpret import model_state, run
from graphpar.program import Info, Program, State, set_info, spec_of
from graphpar.trace import trace

aten = torch.ops.aten


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def as_blocks(model: nn.Sequential) -> Program:
    """Two linear layers as one block that is called twice; the input is leaf 1."""
    block, root = fx.Graph(), fx.Graph()
    x = block.placeholder("x")
    weight = block.create_node("get_attr", "weight")
    block.output((block.call_function(aten.linear.default, (x, weight)),))
    x = root.placeholder("x")
    for path in ("0", "1"):
        call = root.create_node("call_module", path, (x,))
        x = root.call_function(operator.getitem, (call, 0))
    root.output((x, 3))
    for graph in (block, root):
        for node in graph.nodes:
            set_info(node, Info(None))
    return replace(
        trace(model, (torch.ones(2, 4),)),
        graph=root,
        placeholders=(1,),
        blocks={"layer": block},
        calls={"0": "layer", "1": "layer"},
    )


def test_blocks_read_the_state_of_their_path() -> None:
    model, x = two_layers(), torch.randn(2, 4)
    assert torch.equal(run(as_blocks(model), model_state(model), [None, x])[0], model(x))
    assert run(as_blocks(model), model_state(model), [None, x])[1] == 3


def test_tied_names_are_resolved() -> None:
    model, x = two_layers(), torch.randn(2, 4)
    program = as_blocks(model)
    spec = spec_of(model.state_dict()["0.weight"])
    tied = {"0.weight": State("parameter", spec, ("0.weight", "1.weight"))}
    weight: Tensor = model.state_dict()["0.weight"]
    expected = x @ weight.t() @ weight.t()
    found = run(replace(program, state=tied), {"0.weight": weight}, [None, x])[0]
    torch.testing.assert_close(found, expected)


def test_missing_state() -> None:
    model = two_layers()
    with pytest.raises(InternalError, match=r"1\.weight"):
        run(as_blocks(model), {"0.weight": torch.ones(4, 4)}, [None, torch.randn(2, 4)])


def test_ambient_autocast_does_not_reach_in() -> None:
    model, x = two_layers(), torch.randn(2, 4)
    program = trace(model, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        found = run(program, model_state(model), [x])[0]
    assert torch.equal(found, model(x))
