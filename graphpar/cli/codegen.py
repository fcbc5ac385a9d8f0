"""``graphpar codegen``: the kernels of a model's sparse recurrences, as plan, source or code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, fx

from graphpar.cli.loading import HELP, load_model
from graphpar.cli.output import Terminal
from graphpar.codegen.sparse_rnn.compile import Compiled, compile_all, fast_order
from graphpar.codegen.sparse_rnn.devices import DEVICES, device_of
from graphpar.codegen.sparse_rnn.emit import write
from graphpar.codegen.sparse_rnn.emit_fast_helpers import SYNC
from graphpar.codegen.sparse_rnn.emit_fast_parts import emit_fast
from graphpar.codegen.sparse_rnn.exchange import TYPES
from graphpar.codegen.sparse_rnn.fast import plan_of
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.launch import for_triton
from graphpar.codegen.sparse_rnn.plan import Plan
from graphpar.codegen.sparse_rnn.static_checks import check
from graphpar.errors import CapacityError, InputError
from graphpar.interpret import StateValues, model_state
from graphpar.passes.lower_recurrences import LowerRecurrences, lower_recurrences
from graphpar.program import Program, info, tensor_spec
from graphpar.trace import trace

EMITS = ("plan", "source", "ptx", "sass")


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "codegen",
        help="print the kernels of sparse recurrences",
        description="Print the kernels of a model's sparse recurrences. No GPU is needed: its code "
        "is compiled, and checked, for the architecture that is named.",
    )
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument(
        "--arch", choices=list(DEVICES), default="sm_90", help="default: sm_90 (an H200)"
    )
    parser.add_argument(
        "--emit", choices=EMITS, default="plan", help="plan (default), source, ptx or sass"
    )
    parser.add_argument(
        "--type",
        choices=list(TYPES),
        default="bf16",
        help="of weights and of what blocks exchange; default: bf16",
    )
    parser.add_argument(
        "--sync",
        choices=["lamport", "counter"],
        default="lamport",
        help="how blocks wait: for words that carry their epoch (default), or at a counter barrier",
    )
    parser.add_argument(
        "--backward", action="store_true", help="the kernels of backward, not of forward"
    )
    parser.set_defaults(run=run)
    return parser


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One layer and direction: its name, the user's line, its weight and its batch."""

    name: str
    line: str
    cell: str
    weight: Tensor
    batch: int
    reverse: bool
    projected: bool


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    loaded = load_model(options.model)
    weights = model_state(loaded.module)
    chosen = LowerRecurrences(sparse_rnn=True, weights=weights)
    program = lower_recurrences(trace(loaded.module, loaded.args, loaded.kwargs), chosen)
    found = list(recurrences(program, StateValues(program, weights)))
    if not found:
        raise InputError("the model has no recurrence with weights that could be sparse")
    for each in found:
        mark = "//" if options.emit == "ptx" else "#"
        terminal.write(f"{mark} {each.name}: {each.cell}, {each.line}\n")
        try:
            terminal.write(text_of(each, options, terminal))
        except CapacityError as error:
            terminal.write(f"{mark} no kernel: {error}\n")
    return 0


def recurrences(program: Program, values: StateValues) -> Iterator[Recurrence]:
    """The sparse recurrences of a program whose weights are known."""
    names = [name for name, d in program.report.get("sparse_rnn", {}).items() if d.lowered]
    op = torch.ops.graphpar_rnn.sparse_rnn.default
    nodes = [node for node in program.graph.nodes if node.target is op]
    for name, node in zip(names, nodes, strict=True):
        gates, weight, _, projection, _, _, cell, reverse = node.args
        value = values.of(weight)
        if value is not None:
            assert isinstance(gates, fx.Node)
            batch = tensor_spec(gates).shape[1]
            projected = projection is not None
            line = str(info(node).source)
            yield Recurrence(name, line, cell, value, batch, reverse, projected)


def text_of(each: Recurrence, options: argparse.Namespace, terminal: Terminal) -> str:
    """What is to be printed of one kernel.

    Raises:
        CapacityError: it does not fit on the device.
    """
    if each.projected:
        raise CapacityError("an LSTM with projections runs by the library's products")
    plan = plan_of(
        each.weight,
        each.cell,
        "backward" if options.backward else "forward",
        batch=each.batch,
        device=device_of(options.arch),
        value=options.type,
    )
    spec = for_triton(replace(FastSpec.of(plan, reverse=each.reverse), sync=options.sync))
    if options.emit == "plan":
        return describe(plan, spec)
    source = emit_fast(spec)
    if options.emit == "source":
        return source
    with TemporaryDirectory() as folder:
        order = fast_order(spec, write(source, Path(folder)), arch=options.arch)
        (compiled,) = compile_all([order])
    terminal.say(findings(spec, compiled))
    return compiled.ptx if options.emit == "ptx" else compiled.sass


def describe(plan: Plan, spec: FastSpec) -> str:
    """The plan, a line per fact."""
    parts = ", ".join(f"{name} {us:.2f}" for name, us in plan.parts_us.items())
    held = f"{plan.register_words} in registers, {plan.shared_words} in shared memory"
    return (
        f"{plan.device.name}: {plan.programs} blocks of {plan.warps} warps; {spec.part}, "
        f"{spec.value}, {SYNC[spec.sync]}{_inline(spec)}\n"
        f"{plan.words} non-zeros per thread, {held} ({plan.shared_bytes:,} bytes per block)\n"
        f"modelled: {plan.step_us:.2f} us a step ({parts}), {plan.speedup:.1f} times as fast as "
        f"reading the dense matrix ({plan.dense_us:.2f} us)\n"
    )


def _inline(spec: FastSpec) -> str:
    return "; shared memory by inline PTX, for triton 3.6" if spec.inline else ""


def findings(spec: FastSpec, compiled: Compiled) -> str:
    """What the static checks found, as a line."""
    found = check(spec, compiled)
    verdict = "; ".join(found.faults) or "no faults"
    return (
        f"{compiled.arch}: {found.registers} registers, {found.shared_bytes} bytes shared, a step "
        f"has {found.instructions} instructions, {found.gathers} gathers, {found.barriers} "
        f"barriers, {found.polls} polls; {found.resident} blocks a multiprocessor; {verdict}"
    )
