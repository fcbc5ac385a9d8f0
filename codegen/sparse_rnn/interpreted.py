"""Launch the fast kernels in Triton's interpreter, on interleaved blocks: no GPU is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.interleave import Schedule, launch
from graphpar.codegen.sparse_rnn.launch import for_triton


class InterpretedLauncher:
    """A :data:`graphpar.codegen.sparse_rnn.fast_part.Launch` on the CPU, with weak memory.

    Args:
        folder: for the generated files. seed: of the scheduler.

    Attributes:
        launches: how many there were, by part. specs: of which kernels.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.launches: Counter[str] = Counter()
        self.specs: set[FastSpec] = set()
        self._folder, self._seed = folder, seed
        self._modules: dict[FastSpec, Any] = {}

    def __call__(self, spec: FastSpec, programs: int, arguments: Mapping[str, Any]) -> None:
        if spec not in self._modules:
            from graphpar.codegen.sparse_rnn.gluon_shim import load_fast

            self._modules[spec] = load_fast(emit_fast(for_triton(spec)), self._folder)
        self.launches[spec.part] += 1
        self.specs.add(spec)
        shared = [v for k, v in arguments.items() if k in ("exchange_ptr", "counter_ptr")]
        schedule = Schedule(seed=self._seed, weak=True, shared=shared, patience=100)
        kernel = getattr(self._modules[spec], spec.part)
        launch(kernel, programs, {**arguments, "SPIN": False}, schedule)
