"""A small builder for 0-1 programs, solved by HiGHS through scipy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from graphpar.errors import PartitionError

Expression = dict[int, float]


class Milp:
    """Minimise the summed cost of binaries under linear rows."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._rows: list[Mapping[int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._solution: Any = None

    def binary(self, cost: float = 0.0) -> int:
        self._cost.append(cost)
        return len(self._cost) - 1

    def add(self, row: Mapping[int, float], low: float, high: float) -> None:
        self._rows.append(row)
        self._low.append(low)
        self._high.append(high)

    def exactly_one(self, variables: Iterable[int]) -> None:
        self.add(dict.fromkeys(variables, 1.0), 1, 1)

    def solve(self) -> dict[str, Any]:
        """Solve to optimality; returns objective and bound (microseconds), seconds, sizes."""
        started = time.perf_counter()
        entries = [(r, c, v) for r, row in enumerate(self._rows) for c, v in row.items()]
        rows, columns, data = zip(*entries, strict=True)
        shape = (len(self._rows), len(self._cost))
        matrix = coo_matrix((data, (rows, columns)), shape=shape).tocsr()
        cost = np.array(self._cost)
        scale = 1e3 / max(float(np.median(cost[cost > 0])) if (cost > 0).any() else 1.0, 1e-9)
        scale = min(scale, 1e6)
        result = milp(
            cost * scale,
            constraints=LinearConstraint(matrix, self._low, self._high),
            integrality=np.ones(len(cost)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            raise PartitionError(f"no partition satisfies all constraints: {result.message}")
        self._solution = result.x
        return {
            "objective_us": float(result.fun) / scale,
            "bound_us": float(result.mip_dual_bound) / scale,
            "seconds": time.perf_counter() - started,
            "binaries": len(cost),
            "rows": len(self._rows),
        }

    def value(self, variable: int) -> bool:
        return bool(self._solution[variable] > 0.5)
