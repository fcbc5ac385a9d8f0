"""``graphpar dump``: the rewritten graph of a model, or of any stage before it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from graphpar.cli.build import build_stages, with_weights
from graphpar.cli.counts import format_counts, format_report
from graphpar.cli.loading import HELP, load_model
from graphpar.cli.output import Terminal
from graphpar.collector import collector_paused
from graphpar.errors import InputError
from graphpar.formats import FORMATS
from graphpar.mesh import check_tp
from graphpar.pipeline import RNG, Pipeline, default_pipeline
from graphpar.program import Program

LANGUAGES = {"py": "python", "json": "json", "dot": "dot"}
HEADS = {"py": "# stage: {}\n", "dot": "// stage: {}\n"}


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "dump",
        help="print the rewritten graph",
        description="Print the graph of a model, rewritten for TP ranks. No processes are needed.",
    )
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--tp", type=int, required=True, help="number of tensor-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument(
        "--rng", choices=RNG, default="invariant", help="masks of dropout (default: invariant)"
    )
    parser.add_argument(
        "--recompute",
        choices=["none", "selective", "full"],
        default="none",
        help="what backward runs again (default: none)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--stage", metavar="NAME", help='"trace" or a pass, up to which to go (default: the last)'
    )
    which.add_argument("--all-stages", action="store_true", help="every stage")
    parser.add_argument(
        "--format", choices=list(FORMATS), default="py", help="py (default), json or dot"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write NUMBER-STAGE.FORMAT files there, and print their paths",
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    pipeline = default_pipeline(
        tp=check_tp(options.tp), sp=options.sp, rng=options.rng, recompute=options.recompute
    )
    if options.stage:
        pipeline = until(pipeline, options.stage)
    stages: dict[str, Program] = {}
    with collector_paused():  # for longer than its parts do: all ends soon
        loaded = load_model(options.model)
        pipeline = with_weights(pipeline, loaded.module)
        try:
            build_stages(loaded, pipeline, stages.__setitem__)
        finally:  # after a failure, the stages until then
            if options.all_stages or len(stages) == len(pipeline) + 1:
                show(stages, options, terminal)
    program = list(stages.values())[-1]
    terminal.say(format_counts(program))
    if report := format_report(program):
        terminal.say(report)
    return 0


def until(pipeline: Pipeline, stage: str) -> Pipeline:
    """The steps up to the one whose result is ``stage``."""
    names = ["trace", *(each.name for each in pipeline)]
    if stage not in names:
        raise InputError(f"there is no stage {stage!r}; known: {', '.join(names)}")
    return pipeline[: names.index(stage)]


def show(stages: Mapping[str, Program], options: argparse.Namespace, terminal: Terminal) -> None:
    """The last stage, or all, to stdout or to files."""
    chosen = list(stages)[0 if options.all_stages else -1 :]
    write = FORMATS[options.format]
    texts = {name: write(each) if name in chosen else "" for name, each in stages.items()}
    if options.output:
        for path in write_files(options.output, texts, chosen, options.format):
            terminal.write(f"{path}\n")
        return
    if not options.all_stages:
        text = list(texts.values())[-1]
    elif options.format == "json":
        text = (
            "{" + ",".join(f'\n"{name}": {each.strip()}' for name, each in texts.items()) + "\n}\n"
        )
    else:
        head = HEADS[options.format]
        text = "\n".join(head.format(name) + each for name, each in texts.items())
    terminal.write_code(text, LANGUAGES[options.format])


def write_files(
    folder: Path, texts: Mapping[str, str], chosen: list[str], suffix: str
) -> list[Path]:
    """Write each chosen stage to a file whose name starts with the stage's number."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, text) in enumerate(texts.items()):
            if name in chosen:
                written.append(folder / f"{number:02}-{name}.{suffix}")
                written[-1].write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return written
