"""Functions of other packages that improve the decisions of the search, each where a setting asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_epp.cost import Costs
from megatron_epp.plan.lazy import load
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Options, Problem

Finisher = Callable[[Sequence[Decisions], Problem, Costs, Options], Decisions]
"""Returns the fastest of some decisions, the fastest first, and of what it makes of them."""

FINISHERS = {"overlap_exchanges": "megatron_epp.contrib.overlap.search:overlapped"}
"""Switches in `Options`, each with the function for it as ``module:name``, which is imported where the switch is on."""


def finisher_of(options: Options) -> Finisher | None:
    """Return the function that the settings ask for; None if they ask for none."""
    return next((load(where) for switch, where in FINISHERS.items() if getattr(options, switch)), None)


def without_finishers(options: Options) -> Options:
    """Return the settings with all switches of `FINISHERS` off."""
    off: dict[str, Any] = dict.fromkeys(FINISHERS, False)
    return replace(options, **off)
