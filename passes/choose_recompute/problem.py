"""One graph's choice as a problem of its own: what to keep and what to run again.

Backward needs the tensors that autograd would save. Each is kept, at the price of its bytes, or
made again, at the price of its op's time; an op that runs again needs its operands, which are kept
or made again in turn. Tensors are storages, so views cost nothing and keep their base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import networkx as nx
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from graphpar.errors import InternalError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """``reads``, ``makes`` and ``saves`` are indices of storages; ``cost_ps`` is the time of a
    second run in picoseconds, ``None`` if there can be none."""

    cost_ps: int | None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Ops in order, and the bytes of each storage. A storage that no op makes can only be kept."""

    ops: tuple[Op, ...]
    nbytes: tuple[int, ...]

    @property
    def maker(self) -> dict[int, int]:
        return {s: i for i, op in enumerate(self.ops) for s in op.makes}

    def kept(self, replay: Iterable[int]) -> set[int]:
        """The storages to keep if the ops ``replay`` run again."""
        again = set(replay)
        needed = {s for op in self.ops for s in op.saves}
        needed |= {s for i in again for s in self.ops[i].reads}
        return {s for s in needed if self.maker.get(s) not in again}

    def cost(self, replay: Iterable[int]) -> tuple[int, int]:
        """(bytes kept, picoseconds of replay)."""
        again = set(replay)
        if any(self.ops[i].cost_ps is None for i in again):
            raise InternalError("an op that cannot run again does")
        return (
            sum(self.nbytes[s] for s in self.kept(again)),
            sum(self.ops[i].cost_ps or 0 for i in again),
        )


def cheapest(problem: Problem, ps: int, byte: int) -> frozenset[int]:
    """The ops to run again for the least ``byte * bytes + ps * picoseconds``.

    A minimum cut: source → op, its time; op → storage that it makes, the storage's bytes; storage
    → op that reads it and what autograd saves → sink, without limit. An op on the side of the sink
    runs again, a cut edge from an op to a storage keeps it. Integers throughout: exact.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    maker = problem.maker
    for i, op in enumerate(problem.ops):
        if op.cost_ps is None:
            graph.add_edge("source", ("op", i))
        else:
            graph.add_edge("source", ("op", i), capacity=op.cost_ps * ps)
            for s in op.reads:
                graph.add_edge(("storage", s), ("op", i))
        for s in op.saves:
            graph.add_edge(("storage", s), "sink")
    for s, nbytes in enumerate(problem.nbytes):
        source = ("op", maker[s]) if s in maker else "source"
        graph.add_edge(source, ("storage", s), capacity=nbytes * byte)
    _, (_, far) = nx.minimum_cut(graph, "source", "sink")
    return frozenset(node[1] for node in far if node[0] == "op")


def hull(problem: Problem) -> list[frozenset[int]]:
    """The vertices of the lower convex hull of (bytes, time), from no replay to the least bytes.

    Found by bisection on the price of a byte: between two plans the price at which they are equal
    either has a cheaper plan, a vertex between them, or shows that there is none.
    """
    none: frozenset[int] = frozenset()
    total = sum(op.cost_ps or 0 for op in problem.ops)
    least = cheapest(problem, 1, total + 1)
    found = [none]

    def between(left: frozenset[int], right: frozenset[int]) -> None:
        (b0, t0), (b1, t1) = problem.cost(left), problem.cost(right)
        if b0 <= b1 or t1 <= t0:
            return
        ps, byte = b0 - b1, t1 - t0
        middle = cheapest(problem, ps, byte)
        b, t = problem.cost(middle)
        if byte * b + ps * t < byte * b0 + ps * t0:
            between(left, middle)
            found.append(middle)
            between(middle, right)

    between(none, least)
    if problem.cost(least)[0] < problem.cost(none)[0]:
        found.append(least)
    return found


def within(problem: Problem, budget_bytes: int) -> frozenset[int] | None:
    """The ops to run again for the least time with at most ``budget_bytes`` kept; ``None`` if
    there is no way. By HiGHS, for plans between the vertices of the hull."""
    ops, storages = len(problem.ops), len(problem.nbytes)
    rows: list[dict[int, float]] = []
    lower: list[float] = []

    def at_least(low: float, row: dict[int, float]) -> None:
        rows.append(row)
        lower.append(low)

    maker = problem.maker

    def available(s: int) -> dict[int, float]:
        row = {ops + s: 1.0}
        if s in maker:
            row[maker[s]] = 1.0
        return row

    for s in {s for op in problem.ops for s in op.saves}:
        at_least(1.0, available(s))
    for i, op in enumerate(problem.ops):
        for s in op.reads if op.cost_ps is not None else ():
            at_least(0.0, {**available(s), i: -1.0})
    rows.append({ops + s: -float(n) for s, n in enumerate(problem.nbytes)})
    lower.append(-float(budget_bytes))
    matrix = lil_array((len(rows), ops + storages))
    for r, row in enumerate(rows):
        for c, value in row.items():
            matrix[r, c] = value
    upper = np.ones(ops + storages)
    upper[[i for i, op in enumerate(problem.ops) if op.cost_ps is None]] = 0
    cost = np.array([float(op.cost_ps or 0) for op in problem.ops] + [0.0] * storages)
    found = milp(
        cost,
        constraints=LinearConstraint(matrix.tocsr(), lb=np.array(lower)),
        bounds=Bounds(0, upper),
        integrality=np.ones(ops + storages),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    replay = frozenset(i for i in range(ops) if found.x[i] > 0.5)
    return replay if problem.cost(replay)[0] <= budget_bytes else None


def pareto(items: Sequence[_T], key: Callable[[_T], tuple[float, ...]]) -> list[_T]:
    """The items that none beats in every part of ``key``; of equals the first."""
    kept: list[_T] = []
    for item in sorted(items, key=key):
        if not any(all(a <= b for a, b in zip(key(k), key(item), strict=True)) for k in kept):
            kept.append(item)
    return kept
