"""The settings of a plan, each with its values in a row: what the search walks along (`search`).

A new value is an entry here. A new setting is a field of `Recipe`, a row in `SETTINGS`, its values in `values_of`, and what
reads it (`chunk_tables.ChunkTables.table` or `candidates.Candidates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron_epp.features import plan_targets
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS
from megatron_epp.planner.orders.warm_up import ELASTIC_1F1B, CappedWarmUp, OrderRule, WarmUp

WHOLE, LONGEST = 0.0, 0.001  # before 1, so that a walk to coarser grains comes by them last
GRAINS = (WHOLE, LONGEST, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
"""Chunks of a rank to aim at. Coarser grains leave ranks waiting, finer ones cost overhead. `LONGEST`: chunks as long as the
longest sequence; `WHOLE`: a chunk for each sequence.
"""
STARTS = ("longest", "single", "second", "shortest")
"""Sequences that run first: the longest; some of one chunk each; the next longest; the shortest, where all run whole."""
MICROBATCH_STARTS = ("longest", "shortest", "given")
"""The same where the batch's microbatches run whole, all in one order."""
LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Backwards by which a rank is ahead of the next. With 0 one sequence is alive at a time."""


class Recipe(NamedTuple):
    """Values of all settings."""

    grain: float = 12.0
    cut: str = ""  # key of `ChunkTables.cuts`
    start: str = "longest"
    lead: float = 2.0  # one of `Orders.leads`
    reach: str = "need"  # key of `Orders.reaches`: how far forwards run ahead of backwards
    copies: str = "none"  # one of `COPIES`: what goes to the host


class RecipeSetting(NamedTuple):
    """A setting of a recipe. It `is_ordered` if plans get better along its values and then worse, else all are tried. It
    `keeps_chunks` if its values have the same chunks, in the same or another order.
    """

    name: str
    is_ordered: bool = True
    keeps_chunks: bool = False


GRAIN, LEAD, REACH, CUT = (
    RecipeSetting("grain"),
    RecipeSetting("lead", keeps_chunks=True),
    RecipeSetting("reach", is_ordered=False, keeps_chunks=True),
    RecipeSetting("cut", is_ordered=False),
)
EVERY_GRAIN = RecipeSetting("grain", is_ordered=False)
"""Where memory is short, coarse grains and fine ones may fit, and none between."""
SETTINGS = (
    GRAIN,
    LEAD,
    REACH,
    RecipeSetting("start", is_ordered=False, keeps_chunks=True),
    CUT,
)
"""In the order in which they are walked along. With the reach before the lead, reaches without a lead won too early: plans of
several stages per rank were 0.05 % slower on average, by up to 2 %. Copies come last of all (`features.copies`).
"""

COPIES = ("activations", "keys", "both")
STREAMING = COPIES[1:]
"""Copies to the host: of activations that a cap asks for or the link has time for, of keys and values of slices, or of both."""


@dataclass(frozen=True, slots=True)
class ReachRule:
    """Orders in which forwards run ahead of backwards by one rule."""

    # The order for a lead, and a number of chunks by which all ranks are further ahead (`WarmUp.slack`)
    rule: Callable[[float, int], OrderRule]
    is_wide: bool = False  # it fills the memory that caps leave, so depends on them
    splits: bool = False  # weight gradients shape it, where they run apart
    has_lead: bool = True


REACHES = {
    "need": ReachRule(lambda lead, slack: WarmUp(lead, minimal=True, slack=slack)),
    "slices": ReachRule(lambda lead, slack: WarmUp(lead, slack=slack)),
    "room": ReachRule(lambda lead, slack: CappedWarmUp(lead, slack=slack), is_wide=True),
    "more": ReachRule(lambda lead, slack: CappedWarmUp(lead, 1.5, slack), is_wide=True),
}
"""Forwards ahead of backwards: those that the next backward needs, a constant number of slices, as many as the caps leave room
for, or with 1.5 times the bytes of these, by recompute.
"""


class Opening(NamedTuple):
    """A recipe at which further walks begin, with these changes of the best. If it `scans_grains`, every grain is tried first:
    its lead is narrow enough to fit, and hardly slower than wider ones.
    """

    changes: dict[str, Any]
    scans_grains: bool = False


WHOLE_OPENINGS = tuple(
    Opening({"grain": WHOLE, "start": start, "lead": 1.0, "reach": "slices"}) for start in ("longest", "shortest")
)
"""Chunks of whole sequences in 1F1B."""
OPENINGS = (
    Opening({"lead": 3.0, "reach": "room"}),
    Opening({"lead": 1.0, "reach": "need", "start": "second"}, scans_grains=True),
    Opening({"lead": 0.0, "reach": "need"}),
    *WHOLE_OPENINGS,
)
"""Where memory is short."""


class Orders(NamedTuple):
    """Orders that a search tries on a kind of placement, and values that go with them."""

    reaches: Mapping[str, ReachRule]  # by name; a search begins with `first_reach`
    first_reach: str
    # leads, openings: as `LEADS` and `OPENINGS`
    leads: tuple[float, ...]
    openings: tuple[Opening, ...]
    with_copies: tuple[RecipeSetting, ...]  # settings along which walks with copies go: each candidate takes long
    as_given: OrderRule  # the order of a caller's microbatches as they come
    # Orders with forwards and backwards of every stage in the order of a table, first as Megatron has them
    of_table: tuple[OrderRule, ...]


_OF_TABLE = (rule(lead) for lead in (2.0, 1.5, 1.0, 0.5, 0.0) for rule in (partial(WarmUp, minimal=True), WarmUp))
ONE_STAGE = Orders(REACHES, "need", LEADS, OPENINGS, (GRAIN,), ELASTIC_1F1B, (ELASTIC_1F1B, *_OF_TABLE))


def orders_of(problem: Problem, options: Options) -> Orders:
    """Return what is tried with one stage per rank, unless a feature has more for the problem's placement."""
    for orders in plan_targets(problem, options, "orders"):
        own: Orders = orders(problem)
        return own
    return ONE_STAGE


def first_recipe(problem: Problem, options: Options, orders: Orders, cut: str = "") -> Recipe:
    grain = 12.0 if 12.0 * problem.num_ranks <= MOST_CHUNKS else 4.0  # a grain beyond `MOST_CHUNKS` makes no chunks
    return Recipe(grain if options.chunks is None else options.chunks / problem.num_ranks, cut, reach=orders.first_reach)


def values_of(
    problem: Problem, options: Options, orders: Orders, cuts: Iterable[str], splits: bool
) -> dict[str, tuple[Any, ...]]:
    """Return the values of every setting that a search may try, where weight gradients may run apart if it `splits`."""
    is_whole, searches = bool(problem.microbatches), options.slices is None and options.chunks is None
    several_starts = problem.has_one_stage_per_rank and not problem.forward_only
    starts = MICROBATCH_STARTS if is_whole else STARTS if several_starts else STARTS[:1]
    return {
        "grain": GRAINS if searches and not is_whole else (first_recipe(problem, options, orders).grain,),
        "cut": tuple(cuts),
        "start": starts,
        "lead": orders.leads,
        "reach": tuple(name for name, kind in orders.reaches.items() if splits or not kind.splits),
    }
