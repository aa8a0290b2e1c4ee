"""Functions of other packages that improve the decisions of the search, each where a setting asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan.lazy import load
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Options, Problem

Finisher = Callable[[Sequence[Decisions], Problem, Costs, Options], Decisions]
"""Returns the fastest of some decisions, the fastest first, and of what it makes of them."""


def finisher_of(options: Options) -> Finisher | None:
    """Return the function that the settings ask for; None if they ask for none."""
    return load("megatron_epp.contrib.overlap.search:overlapped") if options.overlap_exchanges else None
