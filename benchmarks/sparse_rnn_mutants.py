"""Faults planted in the sparse kernels, and what caught each.

    python benchmarks/sparse_rnn_mutants.py

The mutants are those of the tests. A kernel's text is edited, run in Triton's interpreter with
interleaved blocks and weak memory, and compared with the library's products; a static check reads
the machine code for sm_90. A mutant that nothing catches stops the run.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from _common import report, table

from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.interleave import DeadlockError
from graphpar.codegen.sparse_rnn.launch import for_triton
from graphpar.errors import InternalError
from tests.unit import (
    sparse_kernels,
    test_sparse_fast,
    test_sparse_kernels,
    test_sparse_machine_code,
)


def edit_of(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def verdict(run: Callable[[], Mapping[str, float]], least: float) -> str:
    """What a run shows. Raises AssertionError if it shows nothing."""
    try:
        worst = run()
    except DeadlockError:
        return "deadlock"
    except InternalError as error:
        return str(error)
    name = max(worst, key=lambda key: worst[key])
    assert worst[name] > least, worst
    return f"`{name}` differs by {worst[name]:.1g}"


def quoted(text: str) -> str:
    joined = " ".join(text.split()).replace("|", "\\|")
    return f"`{joined}`" if joined else "nothing"


def main() -> None:
    argparse.ArgumentParser().parse_args()
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        for mutant, (case, old, new, _) in test_sparse_kernels.MUTANTS.items():
            given = replace(case, edit=edit_of(old, new), launches=1, patience=60, batch=2)
            caught = verdict(lambda given=given: sparse_kernels.run(given, folder), 1e-3)
            rows.append([f"reference: {mutant}", quoted(old), quoted(new), caught])
        for mutant, (options, old, new, _) in test_sparse_fast.MUTANTS.items():
            given = {"edit": edit_of(old, new), "steps": 5, **options}
            caught = verdict(
                lambda given=given: test_sparse_fast.run("rnn_tanh", folder, **given), 0.1
            )
            rows.append([f"fast: {mutant}", quoted(old), quoted(new), caught])
        faults = test_sparse_machine_code.FAULTS
        specs = [spec for spec, *_ in faults]
        texts = [
            emit_fast(spec if spec.inline else for_triton(spec)).replace(old, new)
            for spec, _, old, new in faults
        ]
        found = test_sparse_machine_code.findings(specs, folder, ("sm_90",), texts)
        for (spec, wanted, old, new), each in zip(faults, found, strict=True):
            (fault,) = (f for f in each.faults if wanted in f)
            name = f"machine code: {spec.sync}"
            rows.append([name, quoted(old), quoted(new), f"static check: {fault}"])
    body = table(["kernel: mutant", "text", "in its place", "caught as"], rows)
    body += f"\n\n{len(rows)} of {len(rows)} caught."
    report("sparse_rnn_mutants", "Faults planted in the sparse kernels", body)


if __name__ == "__main__":
    main()
