"""Why a plan is as it is: the walks of the search that led to it, and what other values of each setting would have given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError, Plan, PlanError, Remedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.candidates import Candidate, Candidates, codes_of
from megatron_epp.planner.fit import least_peaks, peaks_bytes
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import finished, plan_alone, plan_or_refuse, planned
from megatron_epp.planner.search import search
from megatron_epp.planner.settings import COPIES, LEAD, SETTINGS, Recipe
from megatron_epp.planner.validation import validate


@dataclass(frozen=True, slots=True)
class Walk:
    """The way from a recipe to the best of a search, `is_free` of memory caps or under them.

    There is a candidate for each recipe, of which the last is best, and words for the step to it, empty within a walk.
    """

    is_free: bool
    candidates: tuple[Candidate, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OtherValue:
    """A value of one setting that was not chosen, with the chosen values of all others. Its candidate is None where it makes no
    chunks; `is_same` if its chunks and their order are those that were chosen.
    """

    setting: str
    value: object
    candidate: Candidate | None
    is_same: bool


class RankMemory(NamedTuple):
    """Peak bytes of a rank in the order that was chosen, `plain` if nothing recomputes, `least` if everything does."""

    plain: int
    least: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, and how the search came to it, free of caps and then under them."""

    plan: Plan
    walks: tuple[Walk, ...]
    others: tuple[OtherValue, ...]  # values that were not chosen; empty where no candidate of the search fits
    improved: Recipe  # recipe of the candidate that local search made the fastest of, if it did; else the last of the walk
    # Of every rank; empty where no candidate fits, and with copies to the host, which take bytes away
    memory: tuple[RankMemory, ...]
    # Identities of chunk tables whose candidates were made again, after walks came by, with more memory for messages
    remade: frozenset[int]


def explain(problem: Problem, costs: Costs, options: Options) -> Explanation:
    """Plan as `plan` does, and tell how the search came to the plan. Raises `PlanError` for planners but "greedy", too."""
    if options.planner != "greedy":
        raise PlanError("only the search of the planner greedy can be explained", Remedy("set", "planner", "greedy"))
    validate(problem, costs, options)
    if problem.borrowed and (problem := replace(problem, borrowed=plan_alone(problem, costs, options).borrowed)).borrowed:
        options = replace(options, kv_offload=False)
    candidates = search(Replicas((problem,), costs, options))
    try:
        (plan,) = planned(candidates)
    except InfeasibleError:
        (plan,) = plan_or_refuse((problem,), costs, options)
    free = candidates.free
    assert free is not None
    best = candidates.best()
    remade = frozenset(number for number, _ in candidates.room)
    walks = _walk(free, free.best(), is_free=True), _walk(candidates, best, is_free=False)
    if not best.fits:
        return Explanation(plan, walks, (), best.recipe, (), remade)
    improved, memory = finished(candidates).recipe, tuple(_memory(candidates, best))
    return Explanation(
        plan, walks, tuple(_others(candidates, best)), improved, memory, frozenset(number for number, _ in candidates.room)
    )


def _memory(candidates: Candidates, best: Candidate) -> Iterator[RankMemory]:
    if best.recipe.copies != "none":
        return
    (tables, *_), _ = candidates.tables_and_bound(best.table, best.recipe)
    codes = codes_of(best.whole_backwards)
    nothing = [[0] * len(best.table)] * tables.columns.num_stages
    yield from map(RankMemory, peaks_bytes(codes, tables, nothing), least_peaks(codes, tables))


def _walk(candidates: Candidates, best: Candidate, *, is_free: bool) -> Walk:
    way, words = [best.recipe], list[str]()
    while True:
        before, word = candidates.came_from.get(way[-1], (None, ""))
        words.append(word)
        if before is None:
            break
        way.append(before)
    return Walk(is_free, tuple(candidates.by_recipe[recipe] for recipe in reversed(way)), tuple(reversed(words)))


def _others(candidates: Candidates, best: Candidate) -> Iterator[OtherValue]:
    values = {setting.name: candidates.values[setting.name] for setting in SETTINGS}
    if not candidates.orders.reaches[best.recipe.reach].has_lead:
        del values[LEAD.name]
    if candidates.replicas.can_offload:
        values["copies"] = "none", *COPIES
    for name, row in values.items():
        for value in row:
            if value != getattr(best.recipe, name):
                candidate = candidates.of(best.recipe._replace(**{name: value}))
                is_same = candidate is not None and candidate.decisions == best.decisions
                yield OtherValue(name, value, candidate, is_same)


def changes(before: Recipe, after: Recipe) -> dict[str, tuple[object, object]]:
    return {name: (own, other) for name, own, other in zip(Recipe._fields, before, after, strict=True) if own != other}
