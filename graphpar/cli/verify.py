"""``graphpar verify``: types proven after each pass, then all ranks simulated and compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from graphpar.cli.build import build_stages, with_weights
from graphpar.cli.loading import HELP, load_model
from graphpar.cli.output import Terminal
from graphpar.mesh import check_tp
from graphpar.pipeline import RNG, default_pipeline
from graphpar.program import Program
from graphpar.testing import compare, rewrite
from graphpar.trace import flatten
from graphpar.verify import CHECKS

NOT_EQUIVALENT = 1


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "verify",
        help="prove the layouts and compare with the original",
        description="Verify the program after each pass; then simulate all ranks in this process "
        "and compare every output and gradient with the original model's. Exits with 1 if one "
        "differs.",
    )
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--tp", type=int, required=True, help="number of tensor-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument(
        "--rng",
        choices=[rng for rng in RNG if rng != "per-rank"],
        default="exact",
        help="masks of dropout: the model's own (exact, the default), or invariant, compared with "
        "the model rewritten for one rank",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    pipeline = default_pipeline(tp=check_tp(options.tp), sp=options.sp, rng=options.rng)
    with progress(terminal, len(pipeline) + 3) as bar:
        bar("load the model")
        loaded = load_model(options.model)
        pipeline = with_weights(pipeline, loaded.module)
        upcoming = iter([*(each.name for each in pipeline), f"simulate {options.tp} ranks"])

        def seen(name: str, program: Program) -> None:
            checks = [check.__name__.removeprefix("check_") for check in CHECKS[program.form]]
            terminal.write(f"{name:<20} verified: {', '.join(checks).replace('_', ' ')}\n")
            bar(next(upcoming))

        bar("trace")
        program = build_stages(loaded, pipeline, seen)
        try:
            call = loaded.module, loaded.args, loaded.kwargs
            alone = rewrite(*call, tp=1, rng=options.rng) if options.rng != "exact" else None
            found = compare(program, *call, reference=alone)
        except AssertionError as error:
            if not error.args:  # a plain assert, not a comparison
                raise
            terminal.say(f"not equivalent: {error}")
            return NOT_EQUIVALENT
    trained = sum(s.spec.differentiable for s in program.state.values())
    leaves, _ = flatten(loaded.args, loaded.kwargs)
    inputs = sum(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    terminal.write(
        f"equivalent: {found.compared} tensors compared on {options.tp} simulated ranks: all "
        f"outputs and the gradients of {trained} parameters and {inputs} inputs; the largest "
        f"difference is {found.worst:.2g}\n"
    )
    return 0


@contextmanager
def progress(terminal: Terminal, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal. Each call of the result names the step that starts."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    shown = terminal.err.is_terminal
    with Progress(
        *columns,
        console=terminal.err,
        transient=True,
        disable=not shown,
        redirect_stdout=terminal.out.is_terminal,
    ) as bars:
        task = bars.add_task("", total=total)
        started = iter(range(total + 1))
        yield lambda text: bars.update(task, description=text, completed=next(started))
