"""The case studies of examples/: pruned models of translation and of speech."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar
from graphpar.testing import assert_equivalent

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")


@pytest.fixture
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def example(name: str) -> Any:
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def case(name: str, width: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = example(name).pruned(width)
    if name == "speech":
        return model, (torch.randn(2, 32, 12),)
    return model, (torch.randint(256, (5, 2)), torch.randint(256, (4, 2)))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "layers"), [("translation", 4), ("speech", 4)])
def test_equals_the_original(name: str, layers: int, tp: int, doubles: None) -> None:
    model, args = case(name, 16)
    found = assert_equivalent(model, args, tp=tp, sparse_rnn=True).program
    decisions = found.report["sparse_rnn"].values()
    assert [d.lowered for d in decisions] == [True] * layers
    assert all(d.density == pytest.approx(0.1, abs=0.02) for d in decisions)


@pytest.mark.parametrize("name", ["translation", "speech", "language_model"])
def test_the_docstring_names_the_file(name: str) -> None:
    assert f"python examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()


def test_layers_that_gain_are_lowered_by_default() -> None:
    torch.manual_seed(0)
    model = example("speech").pruned(512)
    sound, letters = torch.randn(1, 32, 40), torch.tensor([[3, 1, 4]])
    parallel = graphpar.transform(model, (sound,), tp=1)
    decisions = parallel.report["sparse_rnn"]
    assert list(decisions) == [
        "layers layer 0", "layers layer 0 reverse", "layers layer 1", "layers layer 1 reverse",
    ]  # fmt: skip
    assert all(d.lowered and d.speedup > 1.1 for d in decisions.values())
    loss = example("speech").loss_of(parallel(sound), letters)
    torch.testing.assert_close(loss, example("speech").loss_of(model(sound), letters))


def test_a_pruned_language_model_fine_tunes_like_the_masked_one() -> None:
    speller = example("language_model")
    text = (EXAMPLES.parent / "LICENSE").read_bytes()  # which no other change touches
    runs = [
        speller.run(text, width=48, steps=40, sparse=sparse, mode=True) for sparse in (False, True)
    ]
    (before, masked, model), (_, sparse, parallel) = runs
    (decision,) = parallel.report["sparse_rnn"].values()
    assert decision.lowered
    assert decision.density == pytest.approx(0.1, abs=0.01)
    assert sparse == pytest.approx(masked, rel=1e-3)
    assert sum(before[:5]) / 5 > 1.5 * sum(masked[-5:]) / 5
    # Pruning costs something, and fine-tuning mends it.
    assert sum(masked[-10:]) < sum(masked[:10])
    state = parallel.full_state_dict()
    name = "lstm.weight_hh_l0_orig"
    torch.testing.assert_close(state[name], model.get_parameter(name).data, rtol=0, atol=2e-3)
