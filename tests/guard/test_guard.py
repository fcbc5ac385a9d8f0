"""What transform makes of four models is what it was: counts against committed ones.

No seconds: numbers of nodes, ops, collectives and their bytes, copies and calls of Python, the
same on every machine. After a wanted change ``pytest tests/guard --update-guard`` rewrites
counts.toml; its diff is part of the change.
"""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zoo
from tests.guard.counting import counts_of

pytestmark = [pytest.mark.guard, pytest.mark.filterwarnings("ignore::graphpar.GraphparWarning")]
FILE = Path(__file__).parent / "counts.toml"
VERSIONS = ("2.11", "2.13")
"""Of torch: the counts are the same on these, but for calls of Python, which are the last one's."""
MOST_MOVED = 0.05
"""Of the calls of Python, before they count as others."""
Section = dict[str, dict[str, int]]

LAYERS = {"llama": 3, "gpt2": 3, "mixtral": 2, "bert": 3}
# Ranks, sequence parallel, and for recomputation the budget of memory in KiB, by model.
CASES: list[tuple[int, bool, dict[str, int] | None]] = [
    (1, False, None),
    (2, False, {"llama": 1110, "gpt2": 1540, "mixtral": 4900, "bert": 1260}),
    (2, True, None),
    (4, True, {"llama": 580, "gpt2": 770, "mixtral": 2400, "bert": 1060}),
]


def name_of(model: str, tp: int, sp: bool, budgets: dict[str, int] | None) -> str:
    return f"{model}, tp={tp}" + ", sp" * sp + ", auto" * bool(budgets)


def written(sections: dict[str, Section]) -> str:
    lines = ["# What test_guard.py expects; `pytest tests/guard --update-guard` rewrites it."]
    for name, section in sections.items():
        lines += ["", f'["{name}"]']
        for part, counts in section.items():
            inner = ", ".join(f"{key} = {value}" for key, value in counts.items())
            lines.append(f"{part} = {{ {inner} }}")
    return "\n".join(lines) + "\n"


def differences(old: Section, new: Section) -> list[str]:
    """``forward.launched: 207 → 210``, one line for each count that is another; calls of Python may
    be a few more or less."""
    flat = [
        {f"{part}.{key}": value for part, counts in each.items() for key, value in counts.items()}
        for each in (old, new)
    ]
    names = dict.fromkeys([*flat[0], *flat[1]])
    return [
        f"{name}: {flat[0].get(name, 'none')} → {flat[1].get(name, 'none')}"
        for name in names
        if not _alike(name, flat[0].get(name), flat[1].get(name))
    ]


def _alike(name: str, old: int | None, new: int | None) -> bool:
    if old is None or new is None or not name.endswith("python_calls"):
        return old == new
    return abs(new - old) <= MOST_MOVED * old


@pytest.mark.parametrize(
    ("tp", "sp", "budgets"), CASES, ids=lambda x: "auto" if isinstance(x, dict) else str(x)
)
@pytest.mark.parametrize("model", LAYERS)
def test_counts(
    model: str,
    tp: int,
    sp: bool,
    budgets: dict[str, int] | None,
    request: pytest.FixtureRequest,
) -> None:
    name = name_of(model, tp, sp, budgets)
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in VERSIONS:
        pytest.skip(f"the counts are those of torch {' and '.join(VERSIONS)}, not {version}")
    options: dict[str, Any] = {"sp": sp, "recompute": "auto" if budgets else "none"}
    if budgets:
        options["memory_budget"] = budgets[model] * 1024
    found = counts_of(partial(zoo.build, model, layers=LAYERS[model]), tp, options)
    known: dict[str, Section] = tomllib.loads(FILE.read_text())
    if request.config.getoption("--update-guard", default=False):
        order = [name_of(each, *case) for each in LAYERS for case in CASES]
        known[name] = found
        FILE.write_text(written({n: known[n] for n in order if n in known}))
        return
    changed = differences(known.get(name, {}), found)
    if version != VERSIONS[-1]:
        changed = [change for change in changed if "python_calls" not in change]
    if changed:
        hint = "if that is wanted: pytest tests/guard --update-guard"
        pytest.fail("\n".join([name, *changed, hint]), pytrace=False)
