"""Recipes as they ship and in their best packing, next to plans at their sizes, and at those that `advise` finds.

Times are by formula, for the same devices and memory. Nothing is fitted to what was measured.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

from megatron_epp.advice.configuration_search import NothingFitsError, advise
from megatron_epp.advice.judge import Judged, exactly
from megatron_epp.advice.question import Question
from megatron_epp.cli.planning_flags import cap_of
from megatron_epp.cost.analytic import MICROSECONDS
from megatron_epp.cost.library import load_cluster
from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Plan
from megatron_epp.planner import Options, plan
from megatron_epp.planner.microbatches import plan_as_given
from megatron_epp.report.text import table
from scripts.bench.frame import Bench, Figures
from scripts.bench.public.recipes import RECIPES, Recipe
from scripts.bench.public.steps import sizes_of
from scripts.bench.rl.rules import Rows, Rule, balanced, nemo_rl, padded, work

TIMES = "shipped", "packed", "same", "advised"
"""Fields of `Gain`."""
PACKINGS = (0.25, 0.5, 1, 2, 4)
"""Token budgets that are tried, in multiples of a recipe's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Time of an update or a step by formula, with the reduction of gradients, and the fullest device.

    Attributes:
        seconds: of it.
        peak_bytes: of the fullest device.
        sizes: in words.
    """

    seconds: float
    peak_bytes: int
    sizes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Times of a recipe; None where nothing fits, or where it was not asked for.

    Attributes:
        recipe: as it ships.
        tokens: of a step of the optimizer.
        cap_bytes: that plans keep to.
        shipped: as it ships, with its schedule, recompute and microbatches, without a cap.
        packed: the same with the token budget that is best for it, and without padding.
        same: our plans at its sizes and layers.
        advised: our plans at the sizes that `advise` finds.
    """

    recipe: Recipe
    tokens: int
    cap_bytes: int
    shipped: Time
    packed: Time
    same: Time | None
    advised: Time | None

    def times(self, ours: Time | None) -> float | None:
        """Return how many times as fast plans are as the recipe in its best packing."""
        return None if ours is None else self.packed.seconds / ours.seconds


def question_of(recipe: Recipe) -> Question:
    """Return the question of which sizes are best for one step of the recipe's optimizer on its devices."""
    cluster = load_cluster(recipe.cluster)
    lengths = recipe.lengths.batch(recipe.sequences)
    options = Options(context=recipe.lengths.longest, offload=recipe.offload)
    return Question(
        recipe.flags,
        cluster,
        recipe.devices,
        cap_of(None, cluster),
        lengths,
        recipe.lengths.longest,
        fixed=dict(recipe.fixed),
        options=options,
    )


def gain_of(recipe: Recipe, *, advises: bool = True) -> Gain:
    """Compare a recipe with plans.

    Args:
        advises: search sizes, too; otherwise `Gain.advised` is None.
    """
    asked = question_of(recipe)
    shipped = as_shipped(recipe, recipe.rule, recipe.budget)
    return Gain(
        recipe=recipe,
        tokens=sum(asked.lengths),
        cap_bytes=asked.cap_bytes,
        shipped=shipped,
        packed=_best_packing(recipe, shipped, asked),
        same=_same_sizes(recipe, asked),
        advised=_advised(recipe, asked) if advises else None,
    )


def as_shipped(recipe: Recipe, rule: Rule, budget: int) -> Time:
    """Return the time in the recipe's schedule of the replicas with the most work."""
    asked, config = question_of(recipe), recipe.config
    asked = replace(asked, flags=asked.flags | {"epp_loss_block_tokens": 0}, cap_bytes=UNLIMITED_BYTES)
    most = max(asked.lengths) if rule is padded else budget
    shares = balanced(asked.lengths, config.data)
    replicas = [rule(share, most) for share in shares]
    groups = [together([replicas[number] for number in group]) for group in config.lockstep_groups]
    planned = _in_its_schedule(recipe, asked, max(groups, key=_work), most)
    seconds = recipe.steps * (planned.predicted.makespan_us + asked.reduction_us(config)) / MICROSECONDS
    return Time(seconds=seconds, peak_bytes=max(planned.predicted.peak_bytes), sizes=sizes_of(config))


def _work(rows: Rows) -> int:
    return sum(work(length) for row in rows for length in row)


def together(replicas: Sequence[Rows]) -> Rows:
    """Return the longest of the microbatches that replicas which share experts run at the same time: all wait for it."""
    return [max(rows, key=lambda row: sum(map(work, row))) for rows in zip_longest(*replicas, fillvalue=[0])]


def _in_its_schedule(recipe: Recipe, asked: Question, rows: Rows, budget: int) -> Plan:
    """Plan microbatches in 1F1B; with several stages on a rank in Megatron's interleaved order, whose packing is its own."""
    config = recipe.config
    options = Options(context=budget, recompute=max(map(int, config.layers)) if recipe.recomputes_all else 0)
    if config.virtual == 1:
        return plan_as_given(tuple(map(tuple, rows)), asked.problem(config, ()), asked.costs(config), options).plan
    problem = asked.problem(config, tuple(length for row in rows for length in row))
    return plan(problem, asked.costs(config), replace(options, planner="interleaved", chunk_tokens=budget))


def _best_packing(recipe: Recipe, shipped: Time, asked: Question) -> Time:
    """Return the fastest of several token budgets that needs no more than the cap, or than the recipe as it ships."""
    rule = nemo_rl if recipe.rule is padded else recipe.rule
    room = max(shipped.peak_bytes, asked.cap_bytes)
    most = max(sum(asked.lengths) // recipe.config.data, recipe.budget)
    budgets = {min(most, round(recipe.budget * factor)) for factor in PACKINGS}
    packed = [as_shipped(recipe, rule, budget) for budget in sorted(budgets) if budget >= max(asked.lengths)]
    return min((shipped, *(time for time in packed if time.peak_bytes <= room)), key=lambda time: time.seconds)


def _same_sizes(recipe: Recipe, asked: Question) -> Time | None:
    try:
        return _time_of(recipe, exactly(asked, recipe.config))
    except InfeasibleError:
        return None


def _advised(recipe: Recipe, asked: Question) -> Time | None:
    try:
        return _time_of(recipe, min(advise(asked).best, key=lambda judged: judged.parts.step_us))
    except NothingFitsError:
        return None


def _time_of(recipe: Recipe, judged: Judged) -> Time:
    seconds = recipe.steps * judged.parts.step_us / MICROSECONDS
    return Time(seconds=seconds, peak_bytes=judged.peak_bytes, sizes=sizes_of(judged.config))


def rows_of(gains: Sequence[Gain]) -> Iterator[str]:
    """Yield a table of recipes, and what each differs in from plans."""
    header = ("", "recipe", "measured", "as shipped", "best packing", "our plans", "faster", "advise", "faster", "its sizes")
    lines = []
    for gain in gains:
        recipe = gain.recipe
        measured = "" if recipe.measured_s is None else f"{recipe.measured_s:.4g} s"
        cells = [recipe.name, f"{recipe.title}, {sizes_of(recipe.config) or 'one device'}", measured]
        cells += [f"{gain.shipped.seconds:.4g} s", f"{gain.packed.seconds:.4g} s"]
        for ours in (gain.same, gain.advised):
            cells += [f"{ours.seconds:.4g} s", f"{gain.times(ours):.2f}x"] if ours else ["-", ""]
        lines.append([*cells, gain.advised.sizes if gain.advised else ""])
    yield from table(header, lines, left=(0, 1, 9))
    for gain in gains:
        recipe, times = gain.recipe, (gain.shipped, gain.packed, gain.same, gain.advised)
        peaks = ", ".join(f"{time.peak_bytes / 2**30:.0f}" if time else "-" for time in times)
        words = [f"{recipe.repository} {recipe.file} ({recipe.commit})"]
        words += [f"{recipe.sequences:,} sequences, {gain.tokens:,} tokens", recipe.lengths.remark]
        words += [recipe.measured] * bool(recipe.measured)
        words += [f"peaks {peaks} of {gain.cap_bytes / 2**30:.0f} GiB"]
        words += [f"not in plans: {recipe.lost}"] * bool(recipe.lost)
        words += [f"advise searches with {' '.join(f'{name} {size}' for name, size in recipe.fixed)}"] * bool(recipe.fixed)
        yield f"{recipe.name}: {'; '.join(words)}"


def row(args: Namespace, recipe: Recipe) -> Figures:
    gain = gain_of(recipe, advises=not args.no_advice)
    times = {name: (time := getattr(gain, name)) and asdict(time) for name in TIMES}
    sizes = {"tokens": gain.tokens, "cap_bytes": gain.cap_bytes}
    return sizes | times | {"times_same": gain.times(gain.same), "times_advised": gain.times(gain.advised)}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    recipes = {recipe.name: recipe for recipe in RECIPES}
    gains = [
        Gain(
            recipe=recipes[row["case"]],
            tokens=row["tokens"],
            cap_bytes=row["cap_bytes"],
            **{name: row[name] and Time(**row[name]) for name in TIMES},
        )
        for row in rows
    ]
    return "\n".join(rows_of(gains))


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {recipe.name: recipe for recipe in RECIPES},
    row=row,
    text=text,
    flags={"no-advice": {"action": "store_true", "help": "do not search sizes for recipes"}},
    takes_jobs=True,
)
