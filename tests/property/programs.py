"""Random programs: modules that wire random parts together, with inputs.

A :class:`Program` is plain data, so that a failing one can be pasted as an ``@example``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.property.pick import Pick
from tests.property.program_draft import Draft, a_size, rarely
from tests.property.program_drawers import embedding
from tests.property.program_nets import Body, Input, Model, make_input, randomise
from tests.property.program_steps import grow

RANKS = (2, 4, 2, 4, 3, 3, 8, 8, 1)


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    body: Body
    tp: int
    sp: bool = False
    seed: int = 0
    training: bool = True

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The module, and the arguments of one call."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            values = [make_input(each) for each in self.inputs]
            model = Model(self.body, values)
            randomise(model)
        names = [f"x{i}" for i in range(1, len(values))]
        model.double().train(self.training)
        return model, (values[0],), dict(zip(names, values[1:], strict=True))


@st.composite
def programs(draw: Any) -> Program:
    return random_program(Pick(draw))


def random_program(pick: Pick, *, most_steps: int = 9) -> Program:
    tp = pick.one(RANKS)
    batch = pick.one((2, 1, 3, 4))
    length = pick.one((tp, 2 * tp, 6, 1, 5, 12)) if tp < 8 else pick.one((8, 8, 5, 6))
    width = a_size(pick, tp)
    kinds = pick.one(
        (
            ("grad",),
            ("plain",),
            ("ids",),
            ("grad", "ids"),
            ("ids", "ids"),
            ("ids", "mask"),
            ("grad", "mask"),
            ("plain", "grad"),
            ("grad", "vector"),
            ("ids", "grad", "grad"),
        )
    )
    inputs = []
    for kind in kinds:
        tokens = kind in ("ids", "mask")
        shape: tuple[int, ...] = (batch, length) if tokens else (batch, length, width)
        if kind == "vector":
            kind, shape = "grad", (width,)
        elif not tokens and rarely(pick, 6):
            shape = pick.one(
                (
                    (batch, width),
                    (batch * length, width),
                    (batch, 1, width),
                    (width,),
                    (1, length, width),
                )
            )
        inputs.append(Input(kind, shape))
    seed = pick.number(0, 2**10)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        d = Draft(pick, tp, [make_input(each) for each in inputs])
        if kinds[0] == "ids":
            d.try_add(embedding(d))
        grow(d, pick.number(1, most_steps))
        outputs = _outputs(d, len(inputs))
    body = Body(d.net.body.steps, outputs, d.net.body.named)
    return Program(tuple(inputs), body, tp, pick.flag(), seed, not rarely(pick, 6))


def _outputs(d: Draft, inputs: int) -> tuple[int, ...]:
    """What nothing reads, and now and then something else."""
    read = {i for step in d.net.body.steps for i in step.inputs}
    own = range(inputs, len(d.values))
    leaves = [i for i in own if i not in read and not d.values[i].is_complex()]
    leaves = leaves[-4:]
    others = [i for i in own if i in read]
    if others and rarely(d.pick, 4):
        leaves.append(d.pick.one(others))
    return tuple(leaves) or (0,)
