"""``graphpar demo``: partition a small GPT-2, show it, train it in several processes."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.progress import track

from graphpar.cli.build import build_stages
from graphpar.cli.counts import format_counts, format_report, most_called
from graphpar.cli.dump import write_files
from graphpar.cli.loading import Loaded
from graphpar.cli.output import Terminal
from graphpar.cli.training import (
    Setting,
    Step,
    make_batches,
    make_call,
    make_model,
    train_parallel,
    train_single,
)
from graphpar.errors import InputError
from graphpar.formats import FORMATS
from graphpar.mesh import check_tp
from graphpar.pipeline import default_pipeline
from graphpar.program import Program
from graphpar.trace import bind

ROWS = 15


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "demo",
        help="partition a small GPT-2 and train it in several processes",
        description="Partition a small GPT-2 of transformers (random weights) with sequence "
        "parallelism, write its graphs to a folder, and train it on the sources of Python's "
        "standard library: in one process as it is, and in TP gloo processes partitioned.",
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    parser.add_argument("--tp", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("graphpar-demo"),
        help="folder for the graphs (default: graphpar-demo)",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    tp = check_tp(options.tp)
    if options.steps < 1:
        raise InputError(f"--steps must be at least 1, not {options.steps}")
    if importlib.util.find_spec("transformers") is None:
        raise InputError("the demo needs transformers: pip install graphpar[test]")
    setting = Setting(steps=options.steps)
    partition(setting, tp, options.output, terminal)
    compare_training(setting, tp, terminal)
    return 0


def partition(setting: Setting, tp: int, folder: Path, terminal: Terminal) -> None:
    """Write every stage to ``folder``; print the layer and its collectives."""
    started = time.perf_counter()
    model = make_model(setting)
    parameters = sum(p.numel() for p in model.parameters())
    loaded = Loaded(model, *bind(model, (), make_call(make_batches(setting)[0])))
    stages: dict[str, Program] = {}
    program = build_stages(
        loaded, default_pipeline(tp=tp, sp=True, rng="exact"), stages.__setitem__
    )
    seconds = time.perf_counter() - started
    for suffix, print_program in FORMATS.items():
        texts = {name: print_program(stage) for name, stage in stages.items()}
        write_files(folder, texts, list(texts) if suffix == "py" else list(texts)[-1:], suffix)
    terminal.write(
        f"GPT-2 of transformers: {setting.layers} layers of width {setting.width}, "
        f"{setting.heads} heads, {parameters:,} parameters\n"
        f"partitioned with tp={tp}, sp=True and verified after each pass in {seconds:.1f} s; "
        f"all stages are in {folder}/\n\n"
    )
    block = most_called(program)
    text = FORMATS["py"](program)
    layer = next(part for part in text.split("\n\n") if part.startswith(f"def {block}("))
    terminal.write_code(f"{layer.rstrip()}\n", "python")
    terminal.write(f"\nCollectives of a training step\n{format_counts(program)}\n")
    if report := format_report(program):
        terminal.write(f"{report}\n")


def compare_training(setting: Setting, tp: int, terminal: Terminal) -> None:
    """Train both, one after the other, and print the losses side by side."""
    name = f"tp={tp}"
    terminal.write(
        f"\nTraining on the sources of Python's standard library: {setting.steps} steps of "
        f"{setting.batch} × {setting.length} bytes\n"
    )
    started = time.perf_counter()
    single = list(_shown(train_single(setting), setting.steps, terminal))
    terminal.write(f"one process, the unmodified model: {_since(started)}\n")
    terminal.say(f"starting {tp} processes")
    started = time.perf_counter()
    every = max(1, -(-setting.steps // ROWS))
    parallel: list[Step] = []
    for index, step in enumerate(train_parallel(setting, tp)):
        if not parallel:
            terminal.write(f"\n{'step':>5}  {'single':>8}  {name:>8}  {'difference':>10}\n")
        parallel.append(step)
        if index % every == 0 or index == setting.steps - 1:
            terminal.write(_row(index, single[index].loss, step.loss))
    worst = max(abs(a.loss - b.loss) for a, b in zip(single, parallel, strict=True))
    terminal.write(
        f"\n{tp} gloo processes, the partitioned model: {_since(started)}, start included\n"
        f"final loss: single {single[-1].loss:.4f}, {name} {parallel[-1].loss:.4f}; "
        f"largest difference of all steps {worst:.1e}\n"
        f"median step: single {_median_ms(single):.0f} ms, {name} {_median_ms(parallel):.0f} ms, "
        "one thread per process\n"
    )


def _row(index: int, single: float, parallel: float) -> str:
    return f"{index:>5}  {single:>8.4f}  {parallel:>8.4f}  {parallel - single:>10.1e}\n"


def _shown(steps: Iterable[Step], total: int, terminal: Terminal) -> Iterator[Step]:
    """The steps, with a progress bar on a terminal."""
    shown = terminal.err.is_terminal
    text = "one process"
    yield from track(steps, text, total, console=terminal.err, transient=True, disable=not shown)


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


def _median_ms(steps: list[Step]) -> float:
    """Without the first step, which warms up."""
    return 1e3 * statistics.median(step.seconds for step in steps[1:] or steps)
