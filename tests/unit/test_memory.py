"""The peak of a training step: that of torch's own tracker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

import graphpar
from graphpar.memory import step_memory
from tests import zoo

pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")
LONG = ["llama", "qwen3", "gemma2", "mixtral", "bert", "t5", "vit", "encoder", "lstm", "deberta"]


def tracked(name: str, tp: int, recompute: str) -> tuple[int, int]:
    """(predicted, tracked) peak of one step of rank 0."""
    torch.distributed.init_process_group("fake", rank=0, world_size=tp)
    try:
        model, kwargs = zoo.build(name)
        parallel = graphpar.transform(model, (), kwargs, tp=tp, sp=True, recompute=recompute)
        predicted = step_memory(parallel.program, trained_inputs=())
        tracker = MemTracker()
        inputs = [x for x in kwargs.values() if isinstance(x, Tensor)]
        # Constants of the program are no buffers of the module.
        constants = parallel.program.constants.values()
        tracker.track_external(parallel, *inputs, *constants)
        with tracker:
            output = parallel(**kwargs)  # held, as what a step returns is
            zoo.loss_of(output).backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        torch.distributed.destroy_process_group()
    assert predicted.peak_bytes >= predicted.forward_bytes > predicted.state_bytes
    return predicted.peak_bytes, peak["Total"]


@pytest.mark.parametrize(
    ("name", "tp", "recompute"),
    [
        ("nanogpt", 1, "full"),
        ("gpt2", 2, "none"),
        *(
            pytest.param(name, tp, recompute, marks=pytest.mark.long)
            for name in LONG
            for tp, recompute in ((1, "none"), (2, "full"), (4, "none"))
        ),
    ],
)
def test_the_peak_is_that_of_torchs_tracker(name: str, tp: int, recompute: str) -> None:
    predicted, found = tracked(name, tp, recompute)
    assert predicted == pytest.approx(found, rel=0.01)
