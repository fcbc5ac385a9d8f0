"""Models of hard kinds, rewritten and simulated: outputs and all gradients equal the original's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graphpar.program import Program
from graphpar.testing import assert_equivalent, rewrite
from graphpar.types import Shard
from tests.zoo.kinds import KINDS, build

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")

SPLITS = [(2, True), (3, True), (4, False), pytest.param(8, False, marks=pytest.mark.long)]

LESS_SHARDED = {"res_net", "low_rank", "tied", "pooled_encoder", "bidirectional_lstm", "bags"}
SHARDED = [name for name in KINDS if name not in LESS_SHARDED]


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def sharded_share(program: Program) -> float:
    """Of all elements of parameters, those whose parameter is sharded."""
    parameters = [s for s in program.state.values() if s.kind == "parameter"]
    sharded = [s for s in parameters if isinstance(s.type, Shard)]
    return sum(s.spec.numel for s in sharded) / sum(s.spec.numel for s in parameters)


@pytest.mark.parametrize(("tp", "sp"), SPLITS)
@pytest.mark.parametrize("name", KINDS)
def test_rewritten_kind_is_the_original(name: str, tp: int, sp: bool) -> None:
    model, args = build(name)
    assert_equivalent(model, args, tp=tp, sp=sp, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", SHARDED)
def test_nearly_all_parameters_are_sharded(name: str) -> None:
    model, args = build(name)
    assert sharded_share(rewrite(model, args, tp=2, sp=True)) >= 0.95
