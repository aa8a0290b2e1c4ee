"""A thin layer over HiGHS (`scipy.optimize.milp`): variables by index, rows by terms. Needs the extra ``milp``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.schedule import PlanError

INFEASIBLE = 2
"""scipy's status of a model without solution."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Attributes:
        values: of every variable, or None where no solution was found in time.
        bound: no solution has a smaller objective; infinite where there is none at all.
        optimal: the solution is as good as the gap asked for.
    """

    values: list[float] | None
    bound: float
    optimal: bool


@dataclass(slots=True)
class Model:
    """Minimise a sum of variables under linear rows."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    entries: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)

    def variable(self, lower: float, upper: float, *, integer: bool = False, cost: float = 0.0) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.cost.append(cost)
        return len(self.cost) - 1

    def binary(self) -> int:
        return self.variable(0.0, 1.0, integer=True)

    def row(self, terms: Iterable[tuple[int, float]], *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """``lower <= sum(coefficient * variable) <= upper``."""
        rows, columns, values = self.entries
        number = len(self.row_lower)
        for variable, coefficient in terms:
            rows.append(number)
            columns.append(variable)
            values.append(coefficient)
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def solve(
        self, *, gap: float = 0.0, time_limit_s: float | None = None, node_limit: int | None = None, relaxed: bool = False
    ) -> Solution:
        """Minimise.

        Args:
            relaxed: let integers take any value between.
            gap: a solution this close to the bound, relative to it, is good enough.
            time_limit_s: stop after so many seconds with the best found so far; what that is depends on the machine.
            node_limit: stop after so many nodes of the search tree with the best found so far; the same on every machine.

        Raises:
            PlanError: scipy is not installed.
        """
        optimize, sparse = _scipy()
        options: dict[str, float] = {"mip_rel_gap": gap}
        if time_limit_s is not None:
            options["time_limit"] = time_limit_s
        if node_limit is not None:
            options["node_limit"] = node_limit
        rows, columns, values = self.entries
        shape = (len(self.row_lower), len(self.cost))
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        found = optimize.milp(
            self.cost,
            integrality=[int(flag and not relaxed) for flag in self.integer],
            bounds=optimize.Bounds(self.lower, self.upper),
            constraints=[optimize.LinearConstraint(matrix, self.row_lower, self.row_upper)] if self.row_lower else [],
            options=options,
        )
        if found.status == INFEASIBLE:
            return Solution(None, math.inf, True)
        bound = found.fun if relaxed else found.mip_dual_bound
        bound = -math.inf if bound is None else float(bound)
        return Solution(None if found.x is None else [float(x) for x in found.x], bound, found.status == 0)


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse  # type: ignore[import-untyped]
    except ImportError as error:
        raise PlanError("this planner needs scipy: pip install 'megatron-epp[milp]', or use --epp-planner greedy") from error
    return optimize, sparse
