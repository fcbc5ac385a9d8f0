"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpar.codegen.sparse_rnn.interpreted import InterpretedLauncher
from graphpar.codegen.sparse_rnn.kernels import Kernels, launching
from tests.unit.sparse_op import (
    SMALL,
)


@pytest.fixture
def interpreted(tmp_path: Path) -> Iterator[tuple[Kernels, InterpretedLauncher]]:
    run = InterpretedLauncher(tmp_path)
    with launching(run, SMALL) as kernels:
        yield kernels, run
