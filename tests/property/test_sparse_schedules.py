"""Random sizes, patterns and schedules of the reference kernels."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpar.codegen.sparse_rnn.cells import CELLS
from tests.unit.sparse_kernels import Case, run


@settings(max_examples=8)
@given(
    case=st.builds(
        Case,
        cell=st.sampled_from(sorted(CELLS)),
        hidden=st.integers(1, 24),
        batch=st.integers(1, 3),
        steps=st.integers(1, 3),
        programs=st.integers(1, 4),
        threads=st.just(128),
        density=st.floats(0, 1),
        sync=st.sampled_from(["lamport", "counter"]),
        reverse=st.booleans(),
        seed=st.integers(0, 99),
        launches=st.just(1),
    )
)
def test_equals_the_stepwise_products(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worst = run(case, Path(folder))
    assert max(worst.values()) < 5e-6, worst
