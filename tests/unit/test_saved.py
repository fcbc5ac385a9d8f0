"""Saved bytes: predicted of the program, measured of the module, equal to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphpar
from graphpar.cost import SavedTensors, dry_run, saved_tensors
from graphpar.parallel_module import ParallelModule
from tests import zoo
from tests.guard.counting import one_of

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")

QUICK = ["gpt2", "mixtral", "lstm"]


def measured(parallel: ParallelModule, **kwargs: Tensor) -> int:
    constants = parallel.program.constants.values()
    with SavedTensors([*parallel.local_tensors().values(), *constants]) as saved:
        output = parallel(**kwargs)
        assert output is not None
        return saved.nbytes


def check(name: str, tp: int, sp: bool, rng: str = "invariant") -> None:
    model, kwargs = zoo.build(name)
    with one_of(tp):
        parallel = graphpar.transform(model, (), kwargs, tp=tp, sp=sp, rng=rng)
        run = dry_run(parallel.program, trained_inputs=())
        assert run.saved_bytes == measured(parallel, **kwargs) > 0
    assert sum(t.nbytes * t.count for t in saved_tensors(run)) == run.saved_bytes


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, True)])
@pytest.mark.parametrize("name", QUICK)
def test_saved_bytes_are_those_measured(name: str, tp: int, sp: bool) -> None:
    check(name, tp, sp)


@pytest.mark.parametrize("rng", ["exact", "per-rank"])
@pytest.mark.parametrize("tp", [1, 2])
def test_saved_masks_are_those_measured(tp: int, rng: str) -> None:
    check("nanogpt", tp, True, rng)


@pytest.mark.long
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", sorted({**zoo.BUILDERS, **zoo.MORE}))
def test_saved_bytes_of_the_whole_zoo(name: str, tp: int, sp: bool) -> None:
    check(name, tp, sp)


def test_a_block_runs_once_however_often_it_is_called() -> None:
    found = []
    for layers in (2, 4):
        model, kwargs = zoo.build("gpt2", layers=layers)
        parallel = graphpar.transform(model, (), kwargs, tp=2, sp=True)
        run = dry_run(parallel.program)
        blocks = [step.block for step in run.steps if step.block is not None]
        assert len(blocks) == layers
        assert len(set(map(id, blocks))) == 1
        found.append((run.saved_bytes, len(saved_tensors(run))))
    model, kwargs = zoo.build("gpt2", layers=4)
    with one_of(2):
        assert (
            measured(graphpar.transform(model, (), kwargs, tp=2, sp=True), **kwargs) == found[1][0]
        )
    assert found[0][1] == found[1][1]  # equal layers folded
    assert found[0][0] < found[1][0]


@pytest.mark.parametrize("trained", [False, True])
def test_inputs_that_need_no_gradient(trained: bool) -> None:
    x = torch.randn(4, 8, requires_grad=trained)
    parallel = graphpar.transform(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), (x,), tp=1)
    names = ["input_1"] if trained else []
    run = dry_run(parallel.program, trained_inputs=names)
    assert run.saved_bytes == measured(parallel, input=x) == 4 * 4 * 8
    assert len(run.steps[0].saves) == trained  # tanh keeps its result


class Reused(nn.Module):
    """Views, an alias, a broadcast, a cast, a p=0 dropout, and a result that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).split(8, -1)
        y = (q * k).double() * v.sigmoid().double()
        y = torch.dropout(y, 0.0, True).float() + torch.arange(8)
        unneeded = y.sin()
        picked = torch.where(unneeded.detach() > 0, y, self.scale)
        return self.last(picked.contiguous().view(-1, 8)).exp()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tp", [1, 2])
def test_views_casts_and_what_nothing_needs(tp: int) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with one_of(tp):
        parallel = graphpar.transform(Reused(), (x,), tp=tp)
        assert dry_run(parallel.program).saved_bytes == measured(parallel, x=x) > 0


def test_a_model_on_the_meta_device_is_counted_without_memory() -> None:
    """A layer of 1 TB of activations: nothing is allocated."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**15, 2**15), nn.GELU(), nn.Linear(2**15, 2**15))
        x = torch.empty(2**23, 2**15, requires_grad=True)
    parallel = graphpar.transform(model, (x,), tp=8)
    run = dry_run(parallel.program)
    width = 4 * 2**23 * 2**15  # a tensor of the stream, in bytes
    assert run.saved_bytes == width + 2 * width // 8  # the input, gelu's input and its output
