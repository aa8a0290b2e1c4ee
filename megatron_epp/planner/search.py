"""The search for a plan: how elastic plans are made.

From a *recipe* (`settings.Recipe`), a value of each setting, a candidate is made without further choice: sequences are cut and
packed into chunks, the actions ordered, recompute (or copies to the host) fitted to the memory caps, and the order timed.
Searching is *walking*: along one setting after another, to both sides, as long as candidates get better. Of candidates that do
not fit, the better one lacks less memory.

First the walk is free of memory caps, to the fastest plan if memory did not matter. From there it goes on under the caps, where
other values may need less recompute. Where memory is short, further walks begin at *openings*, recipes that keep little and
that a walk from the fastest hardly comes by. Copies to the host come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter

from megatron_epp.features import plan_targets
from megatron_epp.planner import settings
from megatron_epp.planner.candidates import NEAR_BOUND_SHARE, Candidate, Candidates
from megatron_epp.planner.replicas import Replicas, too_few_tokens
from megatron_epp.planner.settings import Recipe, RecipeSetting

# Each was changed to half and to twice what it leaves, on 24 cases of `scripts.bench.planner` drawn at random, a third of them
# with copies: one plan of 24 is 1.3 % faster with a MIN_GAIN_SHARE of 0 or OPENINGS_RATIO at 1.01, others differ by less than
# half a percent. MOST_WITHOUT_GAIN, NEAR_RATIO and MOST_WHOLE_SEQUENCES change none by more than 0.03 %: they save time, up to
# a third of the search.
MIN_GAIN_SHARE = 1e-4
"""Relative gain that a chunk table's bound must leave for its orders to be tried."""
MOST_WITHOUT_GAIN = 2
"""Values in a row that may be no faster before a walk turns back."""
NEAR_RATIO = 1.05
"""Makespan, as a multiple of the best, up to which a walk goes on from another grain, or with copies."""
OPENINGS_RATIO, OPENINGS_BOUND_RATIO = 1.03, 1.02
"""Makespan, as a multiple of the fastest without caps, and of the bound, above which openings are tried."""
FEW_ITEMS, MOST_FEW_GRAIN = 400, 4.0
"""Stages times chunks up to which the grains to this one are tried with every way to cut: there both depend on each other."""
SMALL_PLAN_ITEMS = 64
"""Stages times chunks up to which more is tried, and local search runs unasked: compiled, it then takes 20 to 100 ms."""
MOST_WHOLE_SEQUENCES = 64
"""Most sequences for which chunks of whole sequences are tried free of caps."""


def walk(candidates: Candidates, best: Candidate, setting: RecipeSetting) -> Candidate:
    """Walk along one setting to both sides, as long as it gets better; return the best."""
    if setting.keeps_chunks and best.fits and best.makespan_us <= best.bound_us * (1 + NEAR_BOUND_SHARE):
        return best
    if setting is settings.LEAD and not candidates.orders.reaches[best.recipe.reach].has_lead:
        return best
    values, start = candidates.values[setting.name], best
    at = values.index(getattr(start.recipe, setting.name)) if getattr(start.recipe, setting.name) in values else 0
    for side in (values[at + 1 :], values[:at][::-1]) if setting.is_ordered else (values,):
        worse, seen = 0, [start.table]
        for value in side:
            recipe = start.recipe._replace(**{setting.name: value})
            table = candidates.chunk_tables.table(recipe)
            if table is None or (not setting.keeps_chunks and any(table is other for other in seen)):
                continue  # short sequences leave many grains with one table: neither better nor worse
            seen.append(table)
            candidate = candidates.of(recipe, candidates.fastest_us * (1 - MIN_GAIN_SHARE))
            is_better = candidate is not None and candidate.key < best.key
            best = candidate if candidate is not None and is_better else best
            worse = 0 if is_better else worse + 1
            if setting.is_ordered and worse == MOST_WITHOUT_GAIN:
                break
    candidates.step(start.recipe, best.recipe)
    return best


def descend(candidates: Candidates, best: Candidate, along: Sequence[RecipeSetting] = settings.SETTINGS) -> Candidate:
    """Walk along all settings in turn until none makes it better. Arguments as in `walk`."""
    unchanged = at = 0
    while unchanged < len(along):
        after = walk(candidates, best, along[at % len(along)])
        unchanged = unchanged + 1 if after is best else 1
        best, at = after, at + 1
    return best


def at_next_grains(candidates: Candidates, best: Candidate) -> Candidate:
    """Descend from the next finer and the next coarser grain too, where they are nearly as fast: orders depend on them."""
    before = None
    while best is not before and best.fits:
        before = best
        for recipe in next_grains(candidates, before.recipe):
            other = candidates.opening(recipe, before, best.makespan_us * (1 - MIN_GAIN_SHARE))
            if other is not None and other.makespan_us <= NEAR_RATIO * best.makespan_us:
                for setting in settings.SETTINGS:
                    other = walk(candidates, other, setting) if setting.keeps_chunks else other
                best = min(best, other, key=attrgetter("key"))
        best = descend(candidates, best) if best is not before else best
    return best


def next_grains(candidates: Candidates, recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with the next finer and the next coarser grain that makes other chunks."""
    values, same = candidates.values["grain"], candidates.chunk_tables.table(recipe)
    finer, coarser = [grain for grain in values if grain > recipe.grain], [grain for grain in values if grain < recipe.grain]
    for side in (finer, coarser[::-1]):
        others = (recipe._replace(grain=grain) for grain in side)
        yield from islice((other for other in others if candidates.chunk_tables.table(other) not in (None, same)), 1)


def search(replicas: Replicas) -> Candidates:
    """Search, free of caps and then under them; return all candidates under the caps. Raises as `first_candidate` does."""
    free = Candidates(replicas.without_caps)
    fastest, candidates = free_of_caps(free), Candidates(replicas, free)
    best = candidates.of(fastest.recipe)
    assert best is not None
    if not best.fits or best.makespan_us > fastest.makespan_us * (1 + MIN_GAIN_SHARE):  # else it fits as it is
        best = descend(candidates, walk(candidates, best, settings.CUT))
        best = best if candidates.is_single else at_next_grains(candidates, best)
    walk_further(candidates, best, fastest)
    return candidates


def walk_further(candidates: Candidates, best: Candidate, fastest: Candidate) -> None:
    """Walk from openings, and then with copies to the host."""
    best = from_openings(candidates, best, fastest)
    for walk_on in plan_targets(candidates.problem, candidates.options, "search"):
        walk_on(candidates, best, fastest)


def first_candidate(candidates: Candidates, recipe: Recipe) -> Candidate:
    """Return a recipe's candidate, or the first coarser grain's with tokens enough. Raises `InfeasibleError` without one."""
    coarser = [grain for grain in candidates.values["grain"][::-1] if grain < recipe.grain]
    ranks = candidates.problem.num_ranks
    for grain in (recipe.grain, *coarser, *(chunks / ranks for chunks in range(ranks - 1, 0, -1))):
        if (candidate := candidates.of(recipe._replace(grain=grain))) is not None:
            return candidate
    raise too_few_tokens(candidates.replicas)


def free_of_caps(free: Candidates) -> Candidate:
    """Descend without caps, from every way to cut where a token cap binds, and from whole sequences where there are few."""
    first = settings.first_recipe(free.problem, free.options, free.orders, free.values["cut"][0])
    best = descend(free, first_candidate(free, first))
    others = [*other_cuts(free, best, first)]
    if free.is_single and len(free.problem.lengths) <= MOST_WHOLE_SEQUENCES:
        others += (recipe for recipe, _ in openings(free, first, settings.WHOLE_OPENINGS))
    for recipe in others:
        other = free.opening(recipe, best, best.makespan_us * (1 - MIN_GAIN_SHARE))
        if other is not None:
            other = descend(free, other) if recipe.grain != settings.WHOLE else other
            best = min(best, other, key=attrgetter("key"))
    return best if free.is_single else at_next_grains(free, best)


def other_cuts(free: Candidates, best: Candidate, first: Recipe) -> Iterator[Recipe]:
    """Yield recipes at which walks begin with other ways to cut: of few chunks, each at the grain that suits it best."""
    is_few = free.problem.num_stages * len(best.table) <= FEW_ITEMS
    grains = [grain for grain in free.values["grain"] if is_few and settings.WHOLE < grain <= MOST_FEW_GRAIN]
    for cut in free.values["cut"][1:] if is_small(free, best) else free.values["cut"][1:2]:
        yield best.recipe._replace(cut=cut)
        tried = [free.of(first._replace(cut=cut, grain=grain)) for grain in grains]
        if others := [candidate for candidate in tried if candidate is not None]:
            yield min(others, key=attrgetter("key")).recipe


def is_small(candidates: Candidates, best: Candidate) -> bool:
    return candidates.problem.num_stages * len(best.table) <= SMALL_PLAN_ITEMS


def openings(candidates: Candidates, best: Recipe, rows: Sequence[settings.Opening]) -> Iterator[tuple[Recipe, bool]]:
    """Yield recipes at which further walks begin, if the user's settings allow them, and whether every grain is tried first."""
    for changes, scans_grains in rows:
        recipe = best._replace(**changes)
        if all(getattr(recipe, name) in candidates.values[name] for name in ("grain", "reach", "start")):
            yield recipe, scans_grains


def from_openings(candidates: Candidates, best: Candidate, fastest: Candidate) -> Candidate:
    """Descend from openings where the best does not fit, is far from the fastest without caps, or is small."""
    is_far = best.makespan_us > min(OPENINGS_RATIO * fastest.makespan_us, OPENINGS_BOUND_RATIO * best.bound_us)
    if best.fits and not is_far and not is_small(candidates, best):
        return best
    before = best
    # Where prefixes are shared and caps cost nothing, scanning grains took a third of a search, and gained nothing.
    scans = not candidates.problem.borrowed or best.makespan_us > fastest.makespan_us * (1 + MIN_GAIN_SHARE)
    for recipe, scans_grains in openings(candidates, best.recipe, candidates.orders.openings):
        opening = candidates.opening(recipe, before) if scans or not scans_grains else None
        if opening is not None:
            other = walk(candidates, opening, settings.EVERY_GRAIN) if scans_grains else opening
            other = descend(candidates, other, [setting for setting in settings.SETTINGS if setting.name != "cut"])
            best = min(best, other, key=attrgetter("key"))
    return best if best is before else descend(candidates, best)
