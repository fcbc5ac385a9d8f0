"""``graphpar plan``: what a training step takes on each device, by choice of recomputation."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from graphpar.cli.build import build_stages
from graphpar.cli.loading import HELP, load_model
from graphpar.cli.output import Terminal, table
from graphpar.cli.verify import progress
from graphpar.cost import HARDWARE, Hardware, Roofline, Times, dry_run, find_hardware, total_us
from graphpar.cost.calibrate import calibrate_cpu
from graphpar.errors import InputError
from graphpar.mesh import check_tp
from graphpar.passes.choose_recompute import ChooseRecompute, choose_recompute, parse_bytes
from graphpar.passes.choose_recompute.budget import format_bytes
from graphpar.pipeline import RNG, default_pipeline
from graphpar.program import Program
from graphpar.types import local_shape

MODES = ("none", "selective", "full", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One row: bytes on a device, microseconds of a step. ``kept_bytes`` is what autograd keeps,
    ``transient_bytes`` the largest replay; ``optimizer_bytes`` are AdamW's moments."""

    recompute: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    transient_bytes: int
    total_bytes: int
    forward_us: float
    communication_us: float
    replay_us: float
    overhead: float
    fits: bool


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "plan",
        help="predict memory and time for each choice of recomputation",
        description="Predict what one device needs in a training step of the model on TP ranks: "
        "memory to the byte, time from data sheets. The model may be on the meta device.",
    )
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--tp", type=int, required=True, help="number of tensor-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
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
        "--budget",
        metavar="BYTES",
        help='such as 40GiB (default: the device\'s memory, for "auto")',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report", choices=MODES[1:], help="list the tensors kept and made again by this choice"
    )
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    tp = check_tp(options.tp)
    hardware = calibrate_cpu() if options.hardware == "cpu" else find_hardware(options.hardware)
    budget = parse_bytes(options.budget) if options.budget else hardware.memory_bytes
    pipeline = default_pipeline(tp=tp, sp=options.sp, rng=options.rng)
    said: dict[str, str] = {}
    with progress(terminal, len(MODES) + 2) as bar:
        bar("load the model")
        loaded = load_model(options.model)
        bar("rewrite it")
        program = build_stages(loaded, pipeline, lambda _, __: None)
        choices = []
        for mode in MODES:
            bar(f"recompute {mode}")
            choices += _choice(program, mode, budget, Roofline(hardware=hardware), said)
    if options.json:
        data = {
            "version": 1,
            "tp": tp,
            "sp": options.sp,
            "hardware": hardware.name,
            "budget_bytes": budget,
            "choices": [asdict(choice) for choice in choices],
            "sources": dict(hardware.sources),
        }
        terminal.write(json.dumps(data, indent=1) + "\n")
    else:
        terminal.write(_table(choices) + "\n")
        _explain(hardware, budget, terminal)
    if "auto" in said and "auto" not in {each.recompute for each in choices}:
        terminal.say(f"auto: {said['auto']}")
    if options.report:
        terminal.say(said.get(options.report, f"{options.report!r} runs nothing again"))
    return 0


def _choice(
    program: Program, mode: str, budget: int, times: Times, said: dict[str, str]
) -> list[Choice]:
    """The row of one mode, none if nothing fits; ``said`` gets the report or the reason."""
    parameters, buffers = _state(program)
    run = dry_run(program)
    forward_us = total_us(times, run.kernels)
    kept, transient, replay_us = run.saved_bytes, 0, 0.0
    if mode != "none":
        options = ChooseRecompute(
            mode=mode,  # type: ignore[arg-type]
            budget_bytes=budget if mode == "auto" else None,
            times=times,
        )
        try:
            report = choose_recompute(program, options).report["recompute"]
        except InputError as error:
            said[mode] = str(error)
            return []
        said[mode] = str(report)
        kept, transient = report.saved_bytes, report.transient_bytes
        replay_us = report.replay_us
    total = 4 * parameters + buffers + kept + transient
    choice = Choice(
        recompute=mode,
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        kept_bytes=kept,
        transient_bytes=transient,
        total_bytes=total,
        forward_us=forward_us,
        communication_us=total_us(times, (k for k in run.kernels if k.collective)),
        replay_us=replay_us,
        overhead=replay_us / (3 * forward_us) if forward_us else 0.0,
        fits=total <= budget,
    )
    return [choice]


def _state(program: Program) -> tuple[int, int]:
    """Bytes of trained parameters on a rank, and of all other state."""
    trained = other = 0
    for state in program.state.values():
        numel = 1
        for size in local_shape(state.spec.shape, state.type, 0, program.ranks):
            numel *= size
        if state.kind == "parameter" and state.spec.differentiable:
            trained += numel * state.spec.dtype.itemsize
        else:
            other += numel * state.spec.dtype.itemsize
    return trained, other


def _table(choices: list[Choice]) -> str:
    rows = [
        ["recompute", "state", "kept", "at once", "total", "forward", "of it comm.", "replay", "+"]
    ]
    for each in choices:
        state = each.parameter_bytes + each.gradient_bytes + each.optimizer_bytes
        sizes = (state, each.kept_bytes, each.transient_bytes, each.total_bytes)
        times_us = (each.forward_us, each.communication_us, each.replay_us)
        rows.append(
            [
                each.recompute,
                *map(format_bytes, sizes),
                *(f"{us / 1000:.3f} ms" for us in times_us),
                f"{each.overhead:.1%}",
            ]
        )
        rows[-1][0] += "" if each.fits else " (does not fit)"
    return table(rows)


def _explain(hardware: Hardware, budget: int, terminal: Terminal) -> None:
    terminal.say(
        f"{hardware.name}, budget {format_bytes(budget)} per device; state: parameters, gradients "
        "and AdamW's moments; +: replay as a part of forward and backward, taken as three forwards"
    )
    for name, source in hardware.sources.items():
        terminal.say(f"  {name}: {source}")
