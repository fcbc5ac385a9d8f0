"""The demo, with two real processes; and what training.py does when a rank fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphpar.cli.training import Setting, make_batches, make_model, train_parallel, train_single
from graphpar.pipeline import PASSES
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
SMALL = Setting(steps=2, batch=2, length=16, width=16, heads=2, layers=1)


def test_the_demo(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "graphpar", "demo", "--steps", "2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "starting 2 processes\n"
    names = ["trace", *(name for name in PASSES if not name.endswith(("-dropout", "-recompute")))]
    stages = [f"{number:02}-{name}.py" for number, name in enumerate(names)]
    others = [stages[-1].replace(".py", suffix) for suffix in (".dot", ".json")]
    written = [path.name for path in (tmp_path / "graphpar-demo").iterdir()]
    assert sorted(written) == sorted(stages + others)
    assert "def transformer_h(self, x):  # × 4: transformer.h.0 … transformer.h.3\n" in run.stdout
    counts = r"2 all_gather, 2 reduce_scatter +–\n +backward  4 all_gather, 2 reduce_scatter +1 all"
    assert re.search(counts, run.stdout)
    rows = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d\.\d{4}) +(\S+)$", run.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    for _, single, parallel, difference in rows:
        assert abs(float(single) - float(parallel)) < 1e-3
        assert abs(float(difference)) < 1e-4
    assert "final loss: single " in run.stdout


def test_without_transformers(graphpar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = graphpar("demo")
    assert (found.code, found.out) == (2, "")
    assert found.err == "the demo needs transformers: pip install graphpar[test]\n"


def test_the_data_is_text_and_the_same_every_time() -> None:
    setting = Setting(steps=3)
    batches = make_batches(setting)
    assert batches.shape == (3, setting.batch, setting.length)
    assert torch.equal(batches, make_batches(setting))
    text = bytes(batches.flatten().tolist())
    assert sum(byte in b"\n abcdefghijklmnopqrstuvwxyz_" for byte in text) > len(text) / 2


def test_the_model_has_dropout_and_trains() -> None:
    model = make_model(SMALL)
    assert model.training
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    state = torch.get_rng_state()
    first = [step.loss for step in train_single(SMALL)]
    assert first == [step.loss for step in train_single(SMALL)]
    assert torch.equal(state, torch.get_rng_state())


def test_an_error_of_a_rank_is_raised_here() -> None:
    wrong = Setting(steps=2, heads=3)
    with pytest.raises(ValueError, match="must be divisible by num_heads") as found:
        list(train_parallel(wrong, 2))
    assert found.value.__notes__[-1] in ("on rank 0", "on rank 1")
    assert "Traceback" in str(found.value.__cause__)
