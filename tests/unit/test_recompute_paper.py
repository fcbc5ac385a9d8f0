"""Table 2 of Korthikanti et al. 2022 from the graph of a layer written as in the paper."""

from __future__ import annotations

import pytest

from graphpar.cost import Roofline, dry_run, find_hardware
from graphpar.passes.choose_recompute.blocks import curve_of
from tests.unit.paper import paper

CASES = [(name, row, rng) for name in paper.SIZES for row in range(6) for rng in (True, False)]

QUICK = [*(("22b", row, True) for row in range(6)), *((name, 4, False) for name in paper.SIZES)]


@pytest.mark.parametrize(
    ("name", "row", "masks"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.long]) for case in CASES],
)
def test_a_row_is_the_formula_and_statistics(name: str, row: int, masks: bool) -> None:
    """Without masks 32 in place of 34, and 4as/h in place of 5as/h."""
    size, line = paper.SIZES[name], paper.ROWS[row]
    found = paper.saved_bytes(size, line, rng="per-rank" if masks else "invariant")
    statistics = 4 * 4 * size.s * size.b // (size.t if line.sp else 1)
    if line.replay == "full":
        statistics = 0
    seed = 0 if masks and not line.replay else 16
    assert found == round(line.formula(size, masks)) + statistics + seed


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("22b", 7_080_116_224),
        ("175b", 2_868_936_704),
        ("530b", 4_110_450_688),
        ("1t", 5_138_055_168),
    ],
)
def test_a_layer_without_parallelism(name: str, known: int) -> None:
    """Counted before, of a layer run by hand on the meta device."""
    assert paper.saved_bytes(paper.SIZES[name], paper.ROWS[0], rng="per-rank") == known


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "22b" else [pytest.mark.long]) for n in paper.SIZES]
)
def test_the_papers_choice_comes_out_by_itself(name: str) -> None:
    """Section 5: in the bytes of selective recomputation nothing is faster than to run the core
    of attention again, by our cost model, and nothing else is."""
    size, again = paper.SIZES[name], set(paper.core("per-rank"))
    run = dry_run(paper.rewritten(size, tp=size.t, sp=True, rng="per-rank"))
    curve = curve_of(run, Roofline(hardware=find_hardware("a100-80gb")))
    theirs = curve.plan([i for i, node in enumerate(curve.nodes) if paper.name_of(node) in again])
    sbh = size.s * size.b * size.h / size.t
    assert curve.kept_bytes(theirs) / sbh == pytest.approx(34, rel=1e-3)
    ours = curve.within(curve.kept_bytes(theirs))
    assert ours is not None
    assert curve.kept_bytes(ours) <= curve.kept_bytes(theirs)
    assert ours.replay_us <= theirs.replay_us
    assert {paper.name_of(node) for node in ours.replay} == again
    first = {paper.name_of(node) for node in curve.plans[1].replay}
    assert first.isdisjoint(again)  # per byte gelu and norms are cheaper


@pytest.mark.long
def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    paper.main("22b")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[1].split()[2:4] == ["7,079,985,152", "7,080,116,224"]


def test_an_op_that_the_layer_lacks_is_an_error() -> None:
    program = paper.rewritten(paper.SIZES["22b"], tp=1, sp=False, rng="invariant")
    with pytest.raises(ValueError, match="the layer has no sin"):
        paper.again(program, "sin")
