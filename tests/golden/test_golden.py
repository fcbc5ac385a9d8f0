"""Each case is a file: a model, a pipeline, and the dump of its last stage.

``pytest tests/golden --update-golden`` rewrites the dumps. A new case is a file with the first
two lines alone.
"""

import re
from pathlib import Path

import pytest
import torch

from graphpar.pipeline import PASSES, parse_pipeline, run_pipeline
from graphpar.printer import format_python
from graphpar.trace import trace
from tests.golden import models

HERE = Path(__file__).parent
CASES = sorted(path.relative_to(HERE) for path in HERE.glob("*/*.txt"))
HEAD = re.compile(r"# model: (\w+)\n# pipeline: (\S+)\n")


def header(case: Path) -> tuple[str, str]:
    found = HEAD.match((HERE / case).read_text())
    assert found, f"{case} does not start with its model and pipeline"
    return found[1], found[2]


def dump(model: str, pipeline: str) -> str:
    torch.manual_seed(0)
    module, x = getattr(models, model)()
    stages = run_pipeline(trace(module, (x,)), parse_pipeline(pipeline))
    text = format_python(list(stages.values())[-1])
    return f"# model: {model}\n# pipeline: {pipeline}\n\n{text}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dump(case: Path, request: pytest.FixtureRequest) -> None:
    model, pipeline = header(case)
    found = dump(model, pipeline)
    if request.config.getoption("--update-golden", default=False):
        (HERE / case).write_text(found)
    assert found == (HERE / case).read_text()


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_has_a_case_and_says_what_it_does(name: str) -> None:
    folder = name.replace("-", "_")
    cases = [case for case in CASES if case.parts[0] == folder]
    assert cases, f"no golden case in tests/golden/{folder}"
    for case in cases:
        assert parse_pipeline(header(case)[1])[-1].name == name
    text = " ".join((PASSES[name][0].__doc__ or "").split())
    assert "Needs: " in text
    assert "Ensures: " in text
    assert re.search(r"Numerics: (bitwise|reassociates|lossy)\b", text)
