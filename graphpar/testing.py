"""testing: prove a rewritten model equal to the original, with all ranks in this process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpar.cost import CostModel
from graphpar.errors import InputError
from graphpar.interpret import model_state, run
from graphpar.mesh import check_tp
from graphpar.pipeline import default_pipeline, run_pipeline
from graphpar.program import Program, info
from graphpar.simulate import Simulation
from graphpar.trace import bind, flatten, trace
from graphpar.types import Shard

_TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.complex128: (1e-10, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.bfloat16: (3e-2, 3e-2),
}


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What :func:`assert_equivalent` compared: the rewritten program, how many tensors, and the
    largest absolute difference."""

    program: Program
    compared: int
    worst: float


def assert_equivalent(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tp: int,
    sp: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
    cost: CostModel | None = None,
    rng: str = "exact",
    sparse_rnn: bool | str = "auto",
) -> Equivalence:
    """Compare the model rewritten for ``tp`` simulated ranks with the model itself.

    Every output, and after backward from random cotangents every parameter's and input's
    gradient, on every rank. Both runs start from ``seed``, so dropout takes the same masks. With
    ``rng="invariant"``, whose masks are not the model's own, the other side is the model rewritten
    for one rank; "per-rank" promises no equality and is refused.
    A difference may be ``atol`` plus ``rtol`` times the largest element of the tensor; both
    default by dtype (1e-10 for float64): the tensor's own, or a coarser one that the model computes
    in, as in norms that are always float32. No gradient and a gradient of zeros are alike. The
    model is not changed.

    Raises:
        AssertionError: names the first tensor that differs, and by how much.
    """
    if rng == "per-rank":
        raise InputError('rng="per-rank" promises no equality: compare "exact" or "invariant"')
    program = rewrite(model, args, kwargs, tp=tp, sp=sp, cost=cost, rng=rng, sparse_rnn=sparse_rnn)
    reference = rewrite(model, args, kwargs, tp=1, rng=rng) if rng != "exact" else None
    return compare(
        program, model, args, kwargs, atol=atol, rtol=rtol, seed=seed, reference=reference
    )


def rewrite(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tp: int,
    sp: bool = False,
    cost: CostModel | None = None,
    rng: str = "exact",
    sparse_rnn: bool | str = "auto",
) -> Program:
    """The local program of the model for ``tp`` ranks, verified after every pass."""
    bound = bind(model, args, kwargs)
    pipeline = default_pipeline(
        tp=check_tp(tp),
        sp=sp,
        cost=cost,
        rng=rng,
        sparse_rnn=sparse_rnn,
        weights=model_state(model),
    )
    return list(run_pipeline(trace(model, *bound), pipeline).values())[-1]


def compare(
    program: Program,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
    reference: Program | None = None,
) -> Equivalence:
    """Simulate a local program and compare it with ``model``, as :func:`assert_equivalent`.

    ``reference``: a program of the model for one rank, to compare with in its place.
    """
    check = _Comparison(atol, rtol, _widest_tolerance(program))
    bound = bind(model, args, kwargs)
    leaves, spec = flatten(*bound)
    copies = [[_leaf(leaf) for leaf in leaves] for _ in range(program.ranks + 1)]
    twin = _twin(model)
    twin.zero_grad(set_to_none=True)
    twin_args, twin_kwargs = pytree.tree_unflatten(copies[-1], spec)
    simulation = Simulation(program, model_state(model))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if reference is None:
            expected = pytree.tree_leaves(twin(*twin_args, **twin_kwargs))
        else:
            expected = _run_reference(reference, twin, copies[-1])
        torch.manual_seed(seed)
        found = simulation.run(copies[:-1])
        torch.manual_seed(seed + 1)
        cotangents = [torch.randn_like(v) if _differentiable(v) else None for v in expected]

    for index, value in enumerate(expected):
        for rank in range(program.ranks):
            check(f"output {index} on rank {rank}", found[rank][index], value)
    _backward([expected], cotangents)
    _backward(found, cotangents)
    _compare_parameters(check, program, simulation, twin)
    for index, leaf in enumerate(copies[-1]):
        if isinstance(leaf, Tensor) and leaf.grad is not None:
            for rank in range(program.ranks):
                check(
                    f"gradient of input {index} on rank {rank}", copies[rank][index].grad, leaf.grad
                )
    for name, value in model_state(twin).items():
        if program.state[name].kind == "buffer":
            check(f"buffer {name}", simulation.state[name][0], value)
    return Equivalence(program, check.compared, check.worst)


def _twin(model: nn.Module) -> nn.Module:
    """A deep copy. Tensors that hooks compute before each forward, as those of
    ``torch.nn.utils.prune``, refuse to be copied with their history: they lose it."""
    held = [value for module in model.modules() for value in vars(module).values()]
    computed = [v for v in held if isinstance(v, Tensor) and not v.is_leaf]
    return copy.deepcopy(model, {id(v): v.detach().clone() for v in computed})


def _run_reference(reference: Program, twin: nn.Module, leaves: Sequence[Any]) -> list[Any]:
    results = run(reference, model_state(twin), leaves)
    count = len(results) - len(reference.mutations)
    written = [value.detach() for value in results[count:]]
    for name, value in zip(reference.mutations, written, strict=True):
        for alias in reference.state[name].names:
            owner, _, last = alias.rpartition(".")
            twin.get_submodule(owner)._buffers[last] = value
    return results[:count]


def _compare_parameters(
    check: _Comparison, program: Program, simulation: Simulation, twin: nn.Module
) -> None:
    for name, parameter in twin.named_parameters():
        kind = program.state[name].type
        if parameter.grad is None:
            stray = [g for g in simulation.rank_gradients(name) if g is not None and g.any()]
            if stray:
                raise AssertionError(f"{name} has a gradient, but none in the original")
        elif isinstance(kind, Shard):
            check(f"gradient of {name} ({kind})", simulation.gradient(name), parameter.grad)
        else:
            for rank, grad in enumerate(simulation.rank_gradients(name)):
                check(f"gradient of {name} ({kind}) on rank {rank}", grad, parameter.grad)


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _backward(outputs: Sequence[Sequence[Any]], cotangents: Sequence[Tensor | None]) -> None:
    """Backward from all ranks' outputs at once."""
    roots: list[Tensor] = []
    grads: list[Tensor] = []
    for values in outputs:
        for value, cotangent in zip(values, cotangents, strict=True):
            if cotangent is not None and _differentiable(value):
                roots.append(value)
                grads.append(cotangent)
    if roots:
        torch.autograd.backward(roots, grads)


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """The relative and the absolute tolerance."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0, 0.0
    return _TOLERANCE.get(dtype, (1e-2, 1e-2))


def _widest_tolerance(program: Program) -> tuple[float, float]:
    """That of the coarsest type that gradients pass through."""
    found = (0.0, 0.0)
    for _, graph in program.graphs():
        for node in graph.nodes:
            spec = info(node).spec
            for each in spec if isinstance(spec, tuple) else (spec,):
                if each is not None and each.differentiable:
                    found = max(found, _tolerance(each.dtype))
    return found


class _Comparison:
    """``least``: tolerances of floating values that are not given are no smaller."""

    def __init__(self, atol: float | None, rtol: float | None, least: tuple[float, float]) -> None:
        self.atol, self.rtol, self.least = atol, rtol, least
        self.compared, self.worst = 0, 0.0

    def __call__(self, what: str, found: Any, expected: Any) -> None:
        if not isinstance(expected, Tensor):
            if found != expected:
                raise AssertionError(f"{what} is {found!r}, not {expected!r}")
            return
        if found is None:
            if expected.any():
                raise AssertionError(f"{what} is missing")
            return
        rtol, atol = _tolerance(expected.dtype)
        if rtol:
            rtol, atol = max((rtol, atol), self.least)
        rtol = rtol if self.rtol is None else self.rtol
        atol = atol if self.atol is None else self.atol
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise AssertionError(
                f"{what} is {found.dtype}{list(found.shape)}, "
                f"not {expected.dtype}{list(expected.shape)}"
            )
        self.compared += 1
        if not expected.numel():
            return
        if expected.dtype == torch.bool:
            found, expected = found.int(), expected.int()
        found, expected = found.detach(), expected.detach()
        same = (found == expected) | (torch.isnan(found) & torch.isnan(expected))
        difference = (found - expected).abs().double().masked_fill(same, 0.0)
        finite = expected[torch.isfinite(expected)]
        limit = atol + rtol * (float(finite.abs().max()) if finite.numel() else 0.0)
        bad = ~(difference <= limit)
        worst = float(difference.max())
        self.worst = max(self.worst, worst)
        if bad.any():
            raise AssertionError(
                f"{what} differs at {int(bad.sum())} of {bad.numel()} elements, by {worst:.3g} at "
                f"most (allowed: {limit:.3g})"
            )
