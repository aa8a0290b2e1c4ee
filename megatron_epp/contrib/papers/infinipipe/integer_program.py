"""A thin layer over HiGHS (`scipy.optimize.milp`): variables, linear expressions, rows. Needs the extra ``milp``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.contrib.exact.library_output import printing_to_stderr
from megatron_epp.plan import PlanError, Remedy

INFEASIBLE = 2
"""scipy's status of a model without solution."""
ROUNDING = 1e-9
"""A row without variables holds when it is short by no more."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A constant plus variables times coefficients."""

    constant: float = 0.0
    terms: dict[int, float] = field(default_factory=dict)

    def __add__(self, other: Linear | float) -> Linear:
        return total((self, other))

    __radd__ = __add__

    def __sub__(self, other: Linear | float) -> Linear:
        return total((self, -other))

    def __rsub__(self, other: float) -> Linear:
        return total((other, -self))

    def __mul__(self, factor: float) -> Linear:
        return Linear(self.constant * factor, {variable: factor * value for variable, value in self.terms.items()})

    __rmul__ = __mul__

    def __neg__(self) -> Linear:
        return self * -1.0

    def value(self, values: Sequence[float]) -> float:
        """Value of the expression in a solution."""
        return self.constant + sum(factor * values[variable] for variable, factor in self.terms.items())


def total(parts: Iterable[Linear | float]) -> Linear:
    """The sum."""
    constant = 0.0
    terms: dict[int, float] = {}
    for part in parts:
        if isinstance(part, Linear):
            constant += part.constant
            for variable, factor in part.terms.items():
                terms[variable] = terms.get(variable, 0.0) + factor
        else:
            constant += part
    return Linear(constant, terms)


@dataclass(frozen=True, slots=True)
class Solution:
    """Result of a solve."""

    values: list[float] | None  # of every variable, or None where no solution was found in time
    bound: float  # no solution has a smaller objective; infinite where there is none at all


@dataclass(slots=True)
class Model:
    """Minimise a sum of variables under linear rows.

    Choose units in which coefficients are near one: HiGHS takes coefficients below 1e-9 for zero.
    Give a variable in the objective no upper bound: HiGHS 1.12 has been seen to call a solution at that bound optimal when
    there were better ones. A row that keeps the expression behind it small does no harm.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    entries: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    row_lower: list[float] = field(default_factory=list)

    def variable(self, lower: float, upper: float, *, integer: bool = False, cost: float = 0.0) -> Linear:
        """Make a variable.

        Args:
            lower, upper: its range.
            integer: it takes whole numbers only.
        """
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.cost.append(cost)
        return Linear(0.0, {len(self.cost) - 1: 1.0})

    def at_least(self, expression: Linear, least: float = 0.0) -> None:
        """``expression >= least``."""
        if not expression.terms and expression.constant >= least - ROUNDING:
            return
        rows, columns, values = self.entries
        rows += [len(self.row_lower)] * len(expression.terms)
        columns += expression.terms
        values += expression.terms.values()
        self.row_lower.append(least - expression.constant)

    def at_most(self, expression: Linear, most: float = 0.0) -> None:
        """``expression <= most``."""
        self.at_least(-expression, -most)

    def solve(
        self, *, gap: float = 0.0, time_limit_s: float | None = None, node_limit: int | None = None, relaxed: bool = False
    ) -> Solution:
        """Minimise.

        Args:
            gap: a solution this close to the bound, relative to it, is good enough.
            time_limit_s: stop after so many seconds with the best found so far; what that is depends on the machine.
            node_limit: stop after so many nodes of the search tree with the best found so far; the same on every machine.

        Raises:
            PlanError: scipy is not installed.
        """
        optimize, sparse = _scipy()
        options = {"mip_rel_gap": gap, "time_limit": time_limit_s, "node_limit": node_limit}
        rows, columns, values = self.entries
        shape = (len(self.row_lower), len(self.cost))
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        with printing_to_stderr():  # HiGHS prints of its rarer steps whatever its options say
            result = optimize.milp(
                self.cost,
                integrality=[int(flag and not relaxed) for flag in self.integer],
                bounds=optimize.Bounds(self.lower, self.upper),
                constraints=[optimize.LinearConstraint(matrix, self.row_lower, math.inf)] if self.row_lower else [],
                options={name: value for name, value in options.items() if value is not None},
            )
        if result.status == INFEASIBLE:
            return Solution(None, math.inf)
        bound = result.fun if relaxed else result.mip_dual_bound
        bound = -math.inf if bound is None else float(bound)
        return Solution(None if result.x is None else [float(x) for x in result.x], bound)


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse  # type: ignore[import-untyped]
    except ImportError as error:
        remedy = Remedy("set", "planner", "greedy")
        raise PlanError("this planner needs scipy (pip install 'megatron-epp[milp]')", remedy) from error
    return optimize, sparse
