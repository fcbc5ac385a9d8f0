"""The order of the passes, as text and as data, and the one runner.

A step prints as ``annotate-partitions{tp=4,sp=true}`` and parses back, so that a pipeline can be
pasted into a bug report.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from graphpar.cost import CostModel, Times
from graphpar.errors import InputError
from graphpar.passes.annotate import AnnotatePartitions, annotate_partitions
from graphpar.passes.apply_recompute import ApplyRecompute, apply_recompute
from graphpar.passes.choose_recompute import MODES as RECOMPUTE
from graphpar.passes.choose_recompute import ChooseRecompute, choose_recompute
from graphpar.passes.fuse_biases import FuseBiases, fuse_biases
from graphpar.passes.fuse_collectives import FuseCollectives, fuse_collectives
from graphpar.passes.insert_collectives import InsertCollectives, insert_collectives
from graphpar.passes.localize import Localize, localize
from graphpar.passes.lower_recurrences import MODES as SPARSE_RNN
from graphpar.passes.lower_recurrences import LowerRecurrences, lower_recurrences
from graphpar.passes.name_axes import NameAxes, name_axes
from graphpar.passes.normalize import Normalize, normalize
from graphpar.passes.outline import Outline, outline
from graphpar.passes.seed_dropout import SeedDropout, seed_dropout
from graphpar.passes.split_dropout import SplitDropout, split_dropout
from graphpar.program import Program
from graphpar.types import Type
from graphpar.verify import verify

Pass = Callable[[Program, Any], Program]

PASSES: Mapping[str, tuple[Pass, type]] = {
    "lower-recurrences": (lower_recurrences, LowerRecurrences),
    "outline": (outline, Outline),
    "split-dropout": (split_dropout, SplitDropout),
    "normalize": (normalize, Normalize),
    "name-axes": (name_axes, NameAxes),
    "annotate-partitions": (annotate_partitions, AnnotatePartitions),
    "insert-collectives": (insert_collectives, InsertCollectives),
    "fuse-biases": (fuse_biases, FuseBiases),
    "localize": (localize, Localize),
    "seed-dropout": (seed_dropout, SeedDropout),
    "fuse-collectives": (fuse_collectives, FuseCollectives),
    "choose-recompute": (choose_recompute, ChooseRecompute),
    "apply-recompute": (apply_recompute, ApplyRecompute),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A pass with its options."""

    name: str
    options: Any

    def run(self, program: Program) -> Program:
        try:
            return PASSES[self.name][0](program, self.options)
        except Exception as error:
            error.add_note(f"in step {self}")
            raise

    def __str__(self) -> str:
        given = [
            f"{f.name}={_format(value)}"
            for f in fields(self.options)
            if (value := getattr(self.options, f.name)) != _default(f)
            and isinstance(value, (bool, int, float, str))
        ]
        return self.name + (f"{{{','.join(given)}}}" if given else "")


def _default(field: Any) -> Any:
    return field.default


def _format(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


Pipeline = tuple[Step, ...]


def step(name: str, **options: Any) -> Step:
    """A step by name.

    Raises:
        InputError: an unknown name or option; the message lists those known.
    """
    if name not in PASSES:
        raise InputError(f"no pass is named {name!r}; known: {', '.join(PASSES)}")
    kind = PASSES[name][1]
    known = {f.name for f in fields(kind)}
    for option in options:
        if option not in known:
            legal = ", ".join(sorted(known)) or "none"
            raise InputError(f"{name} has no option {option!r}; known: {legal}")
    return Step(name, kind(**options))


RNG = ("invariant", "exact", "per-rank")
"""What the masks of dropout may be; see :func:`graphpar.transform`."""


def default_pipeline(
    *,
    tp: int,
    sp: bool = False,
    cost: CostModel | None = None,
    rng: str = "invariant",
    recompute: str = "none",
    budget_bytes: int | None = None,
    must_fit: bool = True,
    times: Times | None = None,
    state_types: Mapping[str, Type] | None = None,
    sparse_rnn: bool | str = "auto",
    weights: Mapping[str, Tensor] | None = None,
    overlap: bool = True,
) -> Pipeline:
    """What :func:`graphpar.transform` runs after tracing. ``tp=1`` is the identity, but for the
    masks of dropout with ``rng="invariant"`` and sparse recurrences.

    ``recompute``, ``budget_bytes``, ``must_fit``, ``times``: see :class:`ChooseRecompute`.
    ``state_types``: types that parameters already have, from an earlier trace of the model.
    ``weights``: values of state, from which the density of recurrences is measured.
    ``overlap``: fuse collectives with the products beside them.
    """
    if sparse_rnn not in SPARSE_RNN:
        known = ", ".join(map(repr, SPARSE_RNN))
        raise InputError(f"sparse_rnn must be one of {known}, not {sparse_rnn!r}")
    lowered = step(
        "lower-recurrences",
        sparse_rnn=sparse_rnn,
        weights=weights,
        draws_in_order=rng == "exact",
    )
    first = (lowered,) if sparse_rnn else ()
    if rng not in RNG:
        raise InputError(f"rng must be one of {', '.join(map(repr, RNG))}, not {rng!r}")
    if recompute not in RECOMPUTE:
        known = ", ".join(map(repr, RECOMPUTE))
        raise InputError(f"recompute must be one of {known}, not {recompute!r}")
    chosen: Pipeline = ()
    if recompute in ("selective", "full") or (recompute == "auto" and budget_bytes is not None):
        limit = {"budget_bytes": budget_bytes, "must_fit": must_fit}
        options = {"mode": recompute, "times": times, **limit}
        chosen = (step("choose-recompute", **options), step("apply-recompute"))
    if tp == 1:
        seeded = (step("split-dropout"), step("seed-dropout")) if rng == "invariant" else ()
        return (*first, step("outline"), *seeded, *chosen)
    before = () if rng == "exact" else (step("split-dropout"),)
    after = () if rng == "exact" else (step("seed-dropout", rng=rng),)
    return (
        *first,
        step("outline"),
        *before,
        step("normalize"),
        step("name-axes"),
        step(
            "annotate-partitions",
            tp=tp,
            sp=sp,
            cost=cost or CostModel(),
            state_types=state_types,
        ),
        step("insert-collectives"),
        step("fuse-biases"),
        step("localize"),
        *after,
        *((step("fuse-collectives"),) if overlap else ()),
        *chosen,
    )


def format_pipeline(pipeline: Sequence[Step]) -> str:
    return ",".join(map(str, pipeline))


_STEP = re.compile(r"([a-z-]+)(?:\{([^}]*)\})?(?:,|$)")


def parse_pipeline(text: str) -> Pipeline:
    """The inverse of :func:`format_pipeline`."""
    steps, end = [], 0
    while end < len(text):
        match = _STEP.match(text, end)
        if match is None:
            raise InputError(f"cannot read the pipeline at {text[end:]!r}")
        pairs = [pair.partition("=") for pair in (match[2] or "").split(",") if pair]
        steps.append(step(match[1], **{key: _value(value) for key, _, value in pairs}))
        end = match.end()
    return tuple(steps)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text


Observer = Callable[[str, Program, float], None]
"""Called after each step with its text, the program and the seconds it took."""


def run_pipeline(
    program: Program,
    pipeline: Sequence[Step],
    observers: Sequence[Observer] = (),
    *,
    check: bool = True,
) -> dict[str, Program]:
    """Run the steps in order; the result maps "trace" and each step's name to its program.

    ``check`` verifies after every step that changes the program.
    """
    stages = {"trace": program}
    for each in pipeline:
        started = time.perf_counter()
        before, program = program, each.run(program)
        seconds = time.perf_counter() - started
        if check and program is not before:
            try:
                verify(program)
            except Exception as error:
                error.add_note(f"after step {each}")
                raise
        for observe in observers:
            observe(str(each), program, seconds)
        stages[each.name] = program
    return stages
