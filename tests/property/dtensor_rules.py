"""The op rules held against DTensor's sharding strategies.

DTensor (``torch.distributed.tensor``) is asked, for calls of an op, which placements of the
operands it takes without redistribution and what placements come out: two ranks, a fake process
group, one process. What it allows and our rule does not is a :class:`Gap`, with the verdict of
brute force (:class:`tests.property.rule_checks.Checker`).
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from graphpar.axes import OpAxes
from graphpar.passes.rules import Strategy, op_axes, partial_strategies
from graphpar.types import P, R, Shard, Type, cut, letter
from tests.property.pick import Pick, Seeded
from tests.property.rule_checks import (
    Case,
    Checker,
    Maker,
    Target,
    execute,
    is_inexact,
    node_of,
    strategies,
)

RANKS, MOST_PLACEMENTS = 2, 24
RIGHT, REFUTED, FOREIGN = "right", "refuted", "foreign"


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """What DTensor allows of an op and we do not.

    ``form``: the letters of operands and results, ``S R -> P``, dimensions left out; a sum is
    ``P``, other reductions ``P(max)``. ``verdict``: "right" and "refuted" by brute force, or
    "foreign", a reduction that our types do not have.
    """

    op: str
    form: str
    verdict: str


class Redistribution(Exception):
    """DTensor would not run the op on these placements as they are."""


@contextmanager
def two_ranks() -> Iterator[DeviceMesh]:
    """A mesh of two ranks that do not exist, on which redistribution is an error."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def refuse(*_: Any, **__: Any) -> None:
        raise Redistribution

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        where = "torch.distributed.tensor._dispatch.redistribute_local_tensor"
        with mock.patch(where, refuse):
            yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def _undefined(op: Target) -> bool:
    """Whether the values of the result mean nothing."""
    return op._schema.name.startswith(("aten::empty", "aten::new_empty"))


def functional_ops() -> list[Target]:
    """The ATen ops of forward graphs that DTensor has a strategy for: no derivatives, which are
    autograd's here, none that write, which are functionalised, none of optimizers."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (
        propagator.op_strategy_funcs,
        propagator.op_to_rules,
        propagator.op_single_dim_strategy_funcs,
    )
    names = ("backward", "_foreach", "_fused_ad", "_fused_sgd")
    found = {
        op
        for table in tables
        for op in table
        if op.namespace == "aten"
        and not op._schema.is_mutable
        and not _undefined(op)
        and not any(name in str(op) for name in names)
    }
    return sorted(found, key=str)


# --- placements and types ------------------------------------------------------------------------


def _kinds(x: Tensor) -> list[Type]:
    shards = [Shard(d, (size,)) for d, size in enumerate(x.shape) if size % RANKS == 0]
    return [R, *shards, *([P] if is_inexact(x) else [])]


def _placed(x: Tensor, kind: Type, mesh: DeviceMesh) -> DTensor:
    placement: Placement = Replicate() if kind == R else Partial()
    if isinstance(kind, Shard):
        x, placement = cut(x, kind, 0, RANKS).contiguous(), Sharded(kind.dim)
    return DTensor.from_local(x.clone(), mesh, [placement], run_check=False)


def _kind_of(y: DTensor) -> Type | str:
    """The type of a result; a string for a reduction other than a sum, or "?"."""
    placement = y.placements[0]
    if isinstance(placement, Replicate):
        return R
    if isinstance(placement, (Sharded, _StridedShard)):
        if placement.dim >= y.dim():
            return "?"
        count = placement.split_factor if isinstance(placement, _StridedShard) else 1
        return Shard(placement.dim, (y.shape[placement.dim] // count,) * count)
    reduction = str(getattr(placement, "reduce_op", "?"))
    if isinstance(placement, _NormPartial) and placement.norm_type != 1:
        return "norm"
    return P if reduction == "sum" else reduction


def _form(operands: Sequence[Type], results: Sequence[Type | str]) -> str:
    left = " ".join(map(letter, operands))
    return f"{left} -> " + " ".join(f"P({k})" if isinstance(k, str) else letter(k) for k in results)


# --- one op --------------------------------------------------------------------------------------


def _ask(
    node: fx.Node, operands: Sequence[Tensor], kinds: Sequence[Type], mesh: DeviceMesh
) -> list[Type | str] | None:
    """The types of the results if DTensor takes these; ``None`` if it redistributes or refuses."""
    placed = [_placed(x, kind, mesh) for x, kind in zip(operands, kinds, strict=True)]
    assert isinstance(node.target, torch._ops.OpOverload)
    try:
        with torch.no_grad(), warnings.catch_warnings(), CommDebugMode() as collectives:
            warnings.simplefilter("ignore")  # DTensor's own, of numbers made inside an op
            value = execute(node.target, node.args, dict(node.kwargs), placed)
    except (Redistribution, NotImplementedError, RuntimeError):  # its ways to refuse
        return None
    if collectives.get_total_counts():
        return None
    values = value if isinstance(value, (tuple, list)) else [value]
    return [_kind_of(y) for y in values if isinstance(y, DTensor)]


def takes_whole(case: Case, mesh: DeviceMesh) -> bool:
    """Whether DTensor runs the call on operands that are all Replicate: if not, that it refuses
    shards means nothing."""
    node, operands = node_of(case)
    return _ask(node, operands, [R] * len(operands), mesh) is not None


def _ours(op: OpAxes) -> set[Strategy]:
    """Our strategies, with Replicate for Invariant."""
    found = [s for _, s in strategies(op, RANKS)] + partial_strategies(op)
    return {
        Strategy(s.operands, tuple(R if letter(k) == "I" else k for k in s.results)) for s in found
    }


def _verdict(
    node: fx.Node, operands: Sequence[Tensor], op: OpAxes, case: Case, found: Strategy
) -> str:
    try:
        Checker(node, operands, op, case).check(found, RANKS)
    except (AssertionError, RuntimeError):
        return REFUTED
    return RIGHT


_GIVEN = {"rounding_mode": "floor", "decimals": 1}


def alike(target: Target) -> Maker:
    """Calls of a pointwise op: operands that broadcast, scalars of 2; floating where the op takes
    that, else integers."""

    def make(p: Pick) -> Case:
        shape, state = [p.one((2, 4)) for _ in range(p.number(1, 2))], p.number(0, 2**16)
        names = {argument.name for argument in target._schema.arguments}
        given = {name: value for name, value in _GIVEN.items() if name in names}
        for integers in (False, True):
            q, args = Seeded(state), list[Any]()
            for argument in target._schema.arguments:
                if argument.kwarg_only or (argument.has_default_value() and argument.name != "min"):
                    break
                if "Tensor" not in str(argument.type):
                    args.append(2)
                else:
                    first = not any(isinstance(x, Tensor) for x in args)
                    mine = shape if first else q.broadcast(shape)
                    args.append(1 + q.ints(4, *mine) if integers else q.positive(*mine))
            if _runs(target, args, given):
                constant = () if _has_derivatives(target, args, given) else tuple(args)
                return Case(target, tuple(args), given, constant)
        raise TypeError(f"no call of {target}")

    return make


def _runs(target: Target, args: list[Any], given: dict[str, Any]) -> bool:
    """Whether the op takes operands of these dtypes."""
    try:
        target(*args, **given)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _has_derivatives(target: Target, args: list[Any], given: dict[str, Any]) -> bool:
    leaves = [
        x.clone().requires_grad_() if isinstance(x, Tensor) and is_inexact(x) else x for x in args
    ]
    inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    try:
        result = target(*leaves, **given)
        torch.autograd.grad(result.sum(), inputs)
    except RuntimeError:
        return False
    return True


@dataclass(slots=True)
class Compared:
    """How many placements DTensor took, how many of them we allow too, and the others."""

    taken: int
    shared: int
    gaps: set[Gap]


def compare(makers: Sequence[Maker], seed: int, mesh: DeviceMesh) -> Compared:
    """Ask DTensor about one call by each maker."""
    found = Compared(0, 0, set())
    for make in makers:
        case = make(Seeded(seed))
        if _undefined(case.target):
            continue
        node, operands = node_of(case)
        op = op_axes(node)
        ours = _ours(op)
        choices = list(itertools.product(*map(_kinds, operands)))[1:]
        if len(choices) > MOST_PLACEMENTS:
            choices = random.Random(seed).sample(choices, MOST_PLACEMENTS)
        for kinds in choices:
            results = _ask(node, operands, kinds, mesh)
            if results is None:
                continue
            found.taken += 1
            # Our Partial of an average is DTensor's Partial("avg").
            average = "avg" in results
            types = tuple(P if k == "avg" else k for k in results)
            plain = tuple(k for k in types if not isinstance(k, str))
            strategy = Strategy(kinds, plain)
            same = average == (op.average and P in plain and P not in kinds)
            if len(plain) == len(types) and same and strategy in ours:
                found.shared += 1
                continue
            verdict = REFUTED if "?" in results else FOREIGN
            if len(plain) == len(types):
                verdict = _verdict(node, operands, replace(op, average=average), case, strategy)
            found.gaps.add(Gap(str(case.target), _form(kinds, results), verdict))
    return found
