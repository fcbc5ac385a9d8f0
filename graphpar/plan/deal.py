"""The chunks of layers that pipeline stages hold, and what passes between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphpar.cost import GraphRun, Kernel, Step, Times
from graphpar.errors import InputError
from graphpar.plan.schedule import Pipeline
from graphpar.program import Program, TensorSpec, info
from graphpar.types import Shard


def dealt_paths(program: Program) -> list[str]:
    """The calls that stages share out: those of blocks that are called more than once, in order."""
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_module"]
    times = Counter(program.calls[path] for path in calls)
    return [path for path in calls if times[program.calls[path]] > 1]


def check_pipeline(pipeline: Pipeline, layers: int) -> None:
    """Whether the layers can be dealt.

    Raises:
        InputError: they cannot; the message says which ``pp`` could.
    """
    if pipeline.pp > 1 and not layers:
        raise InputError(
            f"the model has no repeated block, so it is planned as one block; pp must be 1, "
            f"not {pipeline.pp}"
        )
    if pipeline.chunks > 1 and layers % pipeline.chunks:
        legal = [n for n in range(1, layers + 1) if not layers % (n * pipeline.interleave)]
        if pipeline.interleave > 1:
            legal = [n for n in legal if n > 1]
        chunks = f" with interleave={pipeline.interleave}" if pipeline.interleave > 1 else ""
        known = ", ".join(map(str, legal)) or "none"
        raise InputError(
            f"{layers} layers cannot be dealt to pp={pipeline.pp} stages{chunks}; legal: {known}"
        )


def deal(run: GraphRun, paths: Sequence[str], chunks: int) -> list[GraphRun]:
    """The root's run in ``chunks`` parts with equally many of the calls named by ``paths``.

    What comes before the first call is of the first part; other ops are of the part of the call
    before them.
    """
    each = len(paths) // chunks if chunks > 1 else 0
    dealt, seen = set(paths), 0
    parts: list[list[Step]] = [[] for _ in range(chunks)]
    for step in run.steps:
        seen += step.block is not None and str(step.node.target) in dealt
        parts[max(seen - 1, 0) // each if each else 0].append(step)
    return [replace(run, steps=tuple(steps)) for steps in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one chunk sends to the next: bytes on a rank of values that are sharded, and of values
    that all ranks hold; of both kinds those with a gradient, which comes back."""

    sharded_bytes: int = 0
    whole_bytes: int = 0
    sharded_gradient_bytes: int = 0
    whole_gradient_bytes: int = 0


def messages(chunks: Sequence[GraphRun]) -> list[Message]:
    """What crosses from each chunk to the next: made before, read behind. A value that a later
    chunk reads is passed on by those between."""
    made: list[set[int]] = [{n for s in part.steps for n in s.results} for part in chunks]
    read: list[set[int]] = [{n for s in part.steps for n in s.reads} for part in chunks]
    makers = {n: s for part in chunks for s in part.steps for n in s.results}
    found = []
    for boundary in range(1, len(chunks)):
        crossing = set().union(*made[:boundary]) & set().union(*read[boundary:])
        message = dict.fromkeys(Message.__slots__, 0)
        for number in crossing:
            storage = chunks[0].storages[number]
            if storage.maker is None or storage.resident:
                continue
            kind, carries = _form(makers[number], number)
            message[f"{kind}_bytes"] += storage.nbytes
            message[f"{kind}_gradient_bytes"] += storage.nbytes * carries
        found.append(Message(**message))
    return found


def _form(step: Step, number: int) -> tuple[str, bool]:
    """Whether a storage's value is "sharded" or "whole", and whether it has a gradient."""
    known = info(step.node)
    specs = known.spec if isinstance(known.spec, tuple) else (known.spec,)
    kinds = known.type if isinstance(known.type, tuple) else (known.type,) * len(specs)
    tensors = [(k, s) for k, s in zip(kinds, specs, strict=True) if isinstance(s, TensorSpec)]
    kind, spec = tensors[step.results.index(number)]
    return ("sharded" if isinstance(kind, Shard) else "whole"), spec.differentiable


def send_us(times: Times, sharded_bytes: int, whole_bytes: int, *, tp: int, stride: int) -> float:
    """Microseconds to the next stage, ``stride`` ranks away.

    A value that all ``tp`` ranks hold is sent in parts and gathered, where that is faster
    (Narayanan et al. 2021, section 4.1).
    """

    def send(nbytes: float) -> float:
        if not nbytes:
            return 0.0
        size = int(nbytes)
        return times.kernel_us(
            Kernel(op="send", collective="send", ranks=2, stride=stride, whole_bytes=size)
        )

    gather = Kernel(op="all_gather", collective="all_gather", ranks=tp, whole_bytes=whole_bytes)
    parts_us = send(sharded_bytes + whole_bytes / tp) + times.kernel_us(gather)
    return min(send(sharded_bytes + whole_bytes), parts_us)
