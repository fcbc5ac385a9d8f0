"""``graphpar plan``: what a training step takes on each device, by choice of recomputation."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphpar.cli.build import build_stages
from graphpar.cli.loading import HELP, load_model
from graphpar.cli.output import Terminal, describe, table
from graphpar.cli.verify import progress
from graphpar.cost import HARDWARE, find_hardware
from graphpar.cost.calibrate import calibrate_cpu
from graphpar.errors import InputError
from graphpar.mesh import check_tp
from graphpar.passes.choose_recompute import MODES, parse_bytes
from graphpar.passes.choose_recompute.budget import format_bytes
from graphpar.pipeline import RNG, default_pipeline
from graphpar.plan import OPTIMIZERS, Pipeline, Planner, Setup, StepPlan, chrome_trace, memory_svg
from graphpar.program import Program


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "plan",
        help="predict memory and time for each choice of recomputation",
        description="Predict what one device needs in a training step of the model on TP ranks: "
        "memory to the byte, time from data sheets. The model, with one microbatch as its "
        "arguments, may be on the meta device.",
    )
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--tp", type=int, required=True, help="number of tensor-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument(
        "--interleave", type=int, default=1, help="chunks of layers on a stage (default: 1)"
    )
    parser.add_argument(
        "--microbatches", type=int, help="microbatches in a step of one replica (default: PP)"
    )
    parser.add_argument("--dp", type=int, default=1, help="replicas (default: 1)")
    parser.add_argument(
        "--whole-microbatches",
        action="store_true",
        help="run nothing again of as many microbatches as the budget has room for",
    )
    parser.add_argument(
        "--rng", choices=RNG, default="invariant", help="masks of dropout (default: invariant)"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        default="h100",
        help=f"{', '.join(HARDWARE)} or cpu, which is measured (default: h100)",
    )
    parser.add_argument(
        "--budget", metavar="BYTES", help="such as 40GiB (default: the device's memory)"
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="AdamW in the parameters' own type, or Adam in 32 bits on parameters in 16, as "
        "Megatron-LM steps (default: adamw)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report", choices=MODES[1:], help="list the tensors kept and made again by this choice"
    )
    parser.add_argument(
        "--choice", choices=MODES, help="what to draw (default: the fastest that fits)"
    )
    parser.add_argument(
        "--plot", metavar="FILE.svg", type=Path, help="draw the fullest stage's memory over time"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", type=Path, help="write the timeline, for Perfetto"
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    setup = _setup(options)
    for path in (options.plot, options.trace):
        if path and not path.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    steps: dict[str, StepPlan] = {}
    said: dict[str, str] = {}
    with progress(terminal, len(MODES) + 2) as bar:
        bar("load the model")
        loaded = load_model(options.model)
        bar("rewrite it")
        stages: dict[str, Program] = {}
        pipeline = default_pipeline(tp=setup.tp, sp=options.sp, rng=options.rng)
        local = build_stages(loaded, pipeline, stages.__setitem__)
        planner = Planner(stages["outline"], local, setup)
        for mode in MODES:
            bar(f"recompute {mode}")
            try:
                steps[mode] = planner.step(mode)
                said[mode] = planner.said
            except InputError as error:
                if mode != "auto":
                    raise
                terminal.say(f"auto: {describe(error)}")
    if options.json:
        terminal.write(json.dumps(_json(options, setup, steps), indent=1) + "\n")
    else:
        terminal.write(_table(steps) + "\n")
        _explain(setup, steps, terminal)
    if options.report in steps:
        terminal.say(said[options.report] or f"{options.report!r} runs nothing again")
    _draw(options, steps, terminal)
    return 0


def _setup(options: argparse.Namespace) -> Setup:
    hardware = calibrate_cpu() if options.hardware == "cpu" else find_hardware(options.hardware)
    microbatches = options.pp if options.microbatches is None else options.microbatches
    return Setup(
        hardware=hardware,
        tp=check_tp(options.tp),
        dp=options.dp,
        pipeline=Pipeline(pp=options.pp, interleave=options.interleave, microbatches=microbatches),
        budget_bytes=parse_bytes(options.budget) if options.budget else hardware.memory_bytes,
        whole_microbatches=options.whole_microbatches,
        optimizer=OPTIMIZERS[options.optimizer],
    )


def _json(options: argparse.Namespace, setup: Setup, steps: dict[str, StepPlan]) -> dict[str, Any]:
    return {
        "version": 2,
        "tp": setup.tp,
        "sp": options.sp,
        **asdict(setup.pipeline),
        "dp": setup.dp,
        "devices": setup.devices,
        "hardware": setup.hardware.name,
        "budget_bytes": setup.budget_bytes,
        "optimizer": setup.optimizer.name,
        "choices": [_row(mode, step) for mode, step in steps.items()],
        "sources": dict(setup.cost.sources),
    }


def _row(mode: str, step: StepPlan) -> dict[str, Any]:
    return {
        "recompute": mode,
        "fullest_stage": step.stages.index(step.fullest),
        "peak_bytes": step.fullest.peak_bytes,
        "fits": step.fits,
        "iteration_us": step.iteration_us,
        "bubble": step.bubble,
        "overhead": step.overhead,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "stages": [asdict(stage) for stage in step.stages],
    }


def _table(steps: dict[str, StepPlan]) -> str:
    head = "recompute parameters gradients optimizer activations peak forward backward replay"
    rows = [[*head.split(), "+", "comm.", "step", "MFU", "HFU"]]
    for mode, step in steps.items():
        full, busy = step.fullest, step.busiest
        sizes = full.parameter_bytes, full.gradient_bytes, full.optimizer_bytes
        times_us = busy.forward_us, busy.backward_us, busy.replay_us
        rows.append(
            [
                mode + ("" if step.fits else " (does not fit)"),
                *map(format_bytes, (*sizes, full.activation_bytes, full.peak_bytes)),
                *map(_ms, times_us),
                f"{step.overhead:.1%}",
                *map(_ms, (busy.communication_us, step.iteration_us)),
                f"{step.mfu:.1%}",
                f"{step.hfu:.1%}",
            ]
        )
    return table(rows)


def _ms(us: float) -> str:
    return f"{us / 1000:.3f} ms" if us < 1e6 else f"{us / 1e6:.3f} s"


def _explain(setup: Setup, steps: dict[str, StepPlan], terminal: Terminal) -> None:
    budget = format_bytes(setup.budget_bytes or 0)
    terminal.say(
        f"{setup.hardware.name}, budget {budget} per device; optimizer: {setup.optimizer.told}; "
        "peak: with what backward makes at once; +: replay as a part of forward and backward; "
        "comm.: collectives in these three, hidden behind products or not; step: with bubble, "
        "gradient all-reduce and optimizer"
    )
    if setup.pipeline.pp > 1:
        terminal.say("bytes are of the fullest stage, times of the busiest:")
        for mode, step in steps.items():
            full = step.fullest
            whole = f", {full.whole_microbatches} keep all" if full.whole_microbatches else ""
            terminal.say(
                f"  {mode}: stage {step.stages.index(full)}, {full.in_flight} forwards in "
                f"flight{whole}; stages wait {step.bubble:.1%} of the pipeline's time"
            )
    for name, source in setup.cost.sources.items():
        terminal.say(f"  {name}: {source}")


def _draw(options: argparse.Namespace, steps: dict[str, StepPlan], terminal: Terminal) -> None:
    if not options.plot and not options.trace:
        return
    mode = options.choice
    if mode is None:
        fitting = [mode for mode, step in steps.items() if step.fits]
        mode = min(fitting or steps, key=lambda mode: steps[mode].iteration_us)
    if mode not in steps:
        raise InputError(f"{mode!r} does not fit, so there is nothing to draw")
    step = steps[mode]
    if options.plot:
        device = step.stages.index(step.fullest)
        title = f"{options.model}, recompute {mode!r}: memory of stage {device}"
        _write(options.plot, memory_svg(step, device, title), terminal)
    if options.trace:
        _write(options.trace, json.dumps(chrome_trace(step)), terminal)


def _write(path: Path, text: str, terminal: Terminal) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    terminal.say(f"wrote {path}")
