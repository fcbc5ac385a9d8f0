"""Plans of one model's step, by choice of recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from graphpar.cost import GraphRun, dry_run
from graphpar.passes.apply_recompute import apply_recompute
from graphpar.passes.choose_recompute import ChooseRecompute, choose_recompute
from graphpar.plan.choose import choose_stages
from graphpar.plan.chunk import Chunk, Coster
from graphpar.plan.deal import check_pipeline, deal, dealt_paths, messages
from graphpar.plan.step import Setup, StepPlan, plan_step
from graphpar.program import Program


class Planner:
    """``whole`` is the model's program before it is partitioned, ``local`` the one of each rank.

    Raises:
        InputError: the layers cannot be dealt to the stages, or the optimizer is for parameters
            of another type.
    """

    def __init__(self, whole: Program, local: Program, setup: Setup) -> None:
        self.local, self.setup = local, setup
        setup.optimizer.check(local)
        self._paths = dealt_paths(local)
        check_pipeline(setup.pipeline, len(self._paths))
        run = dry_run(whole, backward=True)
        kernels = [*run.kernels, *run.backward]
        self.model_flops = sum(kernel.flops for kernel in kernels)
        by_dtype = Counter[torch.dtype]()
        for kernel in kernels:
            by_dtype[kernel.dtype] += kernel.flops
        self.dtype = by_dtype.most_common(1)[0][0] if by_dtype else torch.float32
        self._none: tuple[Chunk, ...] | None = None
        self.said = ""

    def step(self, mode: str) -> StepPlan:
        """The step with ``mode`` of :data:`graphpar.passes.choose_recompute.MODES`; ``said`` is
        then what the choice has to report."""
        self.said = ""
        if mode == "none":
            return self.planned(self.local)
        if mode == "auto":
            parts = self._parts(dry_run(self.local))
            step, self.said = choose_stages(self.local, parts, self.setup, self.planned)
            return step
        marked = self.marked(mode)
        self.said = str(marked.report["recompute"])
        return self.planned(marked)

    def marked(self, mode: str) -> Program:
        """The local program with the nodes that backward runs again marked, by a ``mode`` without
        a budget."""
        options = ChooseRecompute(mode=mode, times=self.setup.cost)  # type: ignore[arg-type]
        return choose_recompute(self.local, options)

    def planned(self, marked: Program, change: Callable[[Chunk], Chunk] | None = None) -> StepPlan:
        """The step of the local program whose nodes are marked for replay.

        ``change`` makes of a chunk's costs others, for what no program says.
        """
        program = apply_recompute(marked)
        chunks, parts = self._chunks(program)
        chunks = tuple(map(change, chunks)) if change else chunks
        whole: tuple[Chunk, ...] = ()
        if self.setup.whole_microbatches and program is not marked:
            if self._none is None:
                self._none = self._chunks(self.local)[0]
            whole = self._none
        return plan_step(
            program,
            chunks,
            messages(parts),
            self.setup,
            model_flops=self.model_flops,
            dtype=self.dtype,
            whole=whole,
        )

    def _chunks(self, program: Program) -> tuple[tuple[Chunk, ...], list[GraphRun]]:
        parts = self._parts(dry_run(program, backward=True))
        coster = Coster(program, self.setup.cost)
        return tuple(map(coster.chunk, parts)), parts

    def _parts(self, run: GraphRun) -> list[GraphRun]:
        return deal(run, self._paths, self.setup.pipeline.chunks)
