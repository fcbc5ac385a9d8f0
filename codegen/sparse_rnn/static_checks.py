"""What can be proven of a fast kernel's machine code without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpar.codegen.sparse_rnn import devices
from graphpar.codegen.sparse_rnn.compile import Compiled
from graphpar.codegen.sparse_rnn.devices import device_of
from graphpar.codegen.sparse_rnn.fast_spec import FastSpec
from graphpar.codegen.sparse_rnn.sass import operation, read

MIN_BARRIERS, MAX_BARRIERS = 2, 3
_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True, slots=True)
class Findings:
    """Counts in one step of the time loop, and what is wrong with the code.

    ``gathers``: loads of states from shared memory. ``barriers``: of the block.
    ``weak_loads``: from global memory, other than the polls. ``polls``: loops that read again.
    """

    instructions: int
    gathers: int
    barriers: int
    weak_loads: int
    polls: int
    registers: int
    shared_bytes: int
    resident: int
    faults: tuple[str, ...]


def resident_blocks(compiled: Compiled) -> int:
    """Blocks that one multiprocessor of the architecture can hold at once."""
    device = device_of(compiled.arch)
    if compiled.registers > _REGISTERS_PER_THREAD:
        return 0
    return devices.resident_blocks(
        warps=compiled.warps,
        registers=compiled.registers,
        shared_bytes=compiled.shared_bytes,
        registers_each=device.registers,
        shared_each=device.shared_bytes,
    )


def check(spec: FastSpec, compiled: Compiled) -> Findings:
    """Look for spills, weights that are loaded again, missing gathers, barriers, polls that the
    compiler hoisted, weak stores to the exchange, and a grid that is not resident at once."""
    code = read(compiled.sass)
    body = [operation(i) for i in code.inside(code.time_loop)]
    loads = [o for o in body if o.startswith("LDG")]
    weak = sum("STRONG" not in o for o in loads)
    stores = [o for o in body if o.startswith("STG.E.64")]
    # Of few columns only a half of the last element is read.
    last = spec.batch - (spec.passes - 1) * spec.columns
    halves = ("LDS",) if spec.payloads == 1 or last <= spec.columns // 2 else ()
    gathers = sum(o.startswith("LDS.64") or o in halves for o in body)
    barriers = sum(o.startswith("BAR") for o in body)
    polls = [p for p in code.inner() if any(_is_strong_load(i) for i in p)]
    resident = resident_blocks(compiled)
    device = device_of(compiled.arch)
    rows_at_once = max(1, compiled.threads * spec.lane_slots // spec.slots)
    per_row = -(-spec.rows // rows_at_once)
    inputs = spec.batch * _inputs(spec) * per_row
    wanted = spec.nonzeros * spec.passes
    faults = []
    if compiled.stack_bytes or any(o.startswith(("LDL", "STL")) for o in body):
        faults.append(f"spills: {compiled.stack_bytes} bytes of stack")
    if weak > inputs:
        faults.append(f"{weak} weak loads a step, the cell needs {inputs}: weights are read again")
    if gathers < wanted:
        faults.append(f"{gathers} gathers a step, fewer than {wanted} non-zeros")
    if not MIN_BARRIERS <= barriers <= MAX_BARRIERS:
        faults.append(f"{barriers} barriers a step")
    if not polls:
        faults.append("no loop reads the exchange again with a strong load")
    if any(operation(i).startswith("BAR") for poll in polls for i in poll):
        faults.append("a barrier inside a poll")
    if _reads_early(body):
        faults.append("states are read before the barrier that ends their writing")
    if spec.sync == "counter":
        faults += _counter_faults(body, polls)
    if not stores or any("STRONG" not in o for o in stores):
        faults.append("no strong store to the exchange, or a weak one")
    if resident * device.multiprocessors < spec.programs:
        faults.append(f"{spec.programs} blocks, {resident} a multiprocessor: not resident at once")
    return Findings(
        len(body), gathers, barriers, weak, len(polls), compiled.registers,
        compiled.shared_bytes, resident, tuple(faults),
    )  # fmt: skip


def _reads_early(body: Sequence[str]) -> bool:
    """Whether a phase between two barriers of the block (the loop goes on at its start) writes
    shared memory and then reads, as if states were gathered at once."""
    phases: list[list[str]] = [[]]
    for each in body:
        if each.startswith("BAR"):
            phases.append([])
        elif each == "LDS" or each.startswith(("LDS.", "STS")):
            phases[-1].append(each[:3])
    phases[0] = phases.pop() + phases[0]
    return any(phase[0] == "STS" and "LDS" in phase for phase in phases if phase)


def _counter_faults(body: Sequence[str], polls: Sequence[tuple[str, ...]]) -> list[str]:
    """A wait must acquire: it drops what the first-level cache holds. An arrival must release: a
    barrier of the block, and a fence, stand before it."""
    faults = []
    if not any(operation(i).startswith("CCTL.IVALL") for poll in polls for i in poll):
        faults.append("the wait for the counter does not acquire")
    arrivals = [i for i, o in enumerate(body) if o.startswith(("RED", "ATOM"))]
    barriers = [i for i, o in enumerate(body) if o.startswith("BAR")]
    for arrival in arrivals:
        last = max((i for i in barriers if i < arrival), default=0)
        if not any(o.startswith("MEMBAR") for o in body[last:arrival]):
            faults.append("an arrival does not release")
    return faults if arrivals else [*faults, "no arrival at the counter"]


def _inputs(spec: FastSpec) -> int:
    """Values that a step reads from global memory for a unit and batch column."""
    if spec.part == "forward":
        return spec.cell.gates
    # Its own gradient, the saved values, and the state before: two masked loads, or none.
    return 1 + spec.cell.saved + (2 if spec.cell.saved else 1)


def _is_strong_load(instruction: str) -> bool:
    name = operation(instruction)
    return name.startswith("LDG.E.") and "STRONG" in name
