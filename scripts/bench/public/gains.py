"""Recipes as they ship and with all that Megatron's flags can say, next to plans at their sizes, and at those that suit both.

Megatron's own schedule has virtual stages, layers, rows and recompute at their best (`megatron_epp.advice.causes`), with the
recipe's parallel sizes, and with any. Times are by formula, for the same devices and memory. Nothing is fitted to what was
measured.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

from megatron_epp.advice.causes import CAUSES, PLANNER, Stock, gain_of
from megatron_epp.advice.configuration_search import Advice, NothingFitsError, advise
from megatron_epp.advice.judge import Judged, choices_of, exactly, shares_by_work
from megatron_epp.advice.question import Configuration, Question
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
from scripts.bench.rl.rules import Rows, Rule, balanced, padded, work

TIMES = "shipped", "stock", "same", "stock_anywhere", "advised"
"""Times of a `Compared`."""


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
class Compared:
    """Times of a recipe; None where nothing fits, or where it was not asked for.

    Attributes:
        recipe: as it ships.
        tokens: of a step of the optimizer.
        cap_bytes: that plans, and Megatron's schedule at its best, keep to.
        shipped: as it ships, with its schedule, recompute and microbatches, without a cap.
        stock: Megatron's schedule at its best at the recipe's sizes, or as the recipe ships if that is faster.
        same: our plans at its sizes and layers, or at those of `stock`.
        causes: how much faster each of `CAUSES` makes `same`, over even layers on one stage per rank.
        stock_anywhere: Megatron's schedule at its best at any sizes.
        advised: our plans at the sizes that `advise` finds.
        causes_advised: the same of `advised`.
    """

    recipe: Recipe
    tokens: int
    cap_bytes: int
    shipped: Time
    stock: Time | None
    same: Time | None
    causes: tuple[float, ...]
    stock_anywhere: Time | None
    advised: Time | None
    causes_advised: tuple[float, ...]

    @property
    def times_same(self) -> float | None:
        """How many times as fast plans are as Megatron's schedule at the recipe's sizes."""
        return self.stock.seconds / self.same.seconds if self.stock and self.same else None

    @property
    def times_advised(self) -> float | None:
        """How many times as fast plans are as Megatron's schedule, both at the sizes that suit them best."""
        return self.stock_anywhere.seconds / self.advised.seconds if self.stock_anywhere and self.advised else None


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


def compared(recipe: Recipe, *, advises: bool = True) -> Compared:
    """Compare a recipe with plans.

    Args:
        advises: search sizes, too; otherwise there is nothing of other sizes.
    """
    asked = question_of(recipe)
    shipped = as_shipped(recipe, recipe.rule, recipe.budget)
    choices = choices_of(asked, recipe.config, shares_by_work(asked, recipe.config), [recipe.config.stages])
    steps = choices.steps()
    best = steps[-1]
    at = dict.fromkeys((recipe.config, *([recipe.config.with_layout(best.layout)] if best else [])))
    judged = min(filter(None, (_judged(asked, config) for config in at)), key=lambda each: each.parts.step_us, default=None)
    gain = None
    if judged is not None:
        gain = gain_of((*steps, choices.by_chunk(best)), judged.parts.step_us, judged.parts.step_us)
    times = [_time_of_stock(recipe, recipe.config, best)] if best else []
    times.append(shipped)  # it has run, whatever its memory by formula
    advice = _advice(asked) if advises else None
    plain = None if advice is None else advice.plain
    anywhere = [] if advice is None else [min(times, key=lambda time: time.seconds)]
    anywhere += [] if plain is None else [_time_of_stock(recipe, plain.config, plain.stock)]
    fastest = None if advice is None else min(advice.best, key=lambda each: each.parts.step_us)
    return Compared(
        recipe=recipe,
        tokens=sum(asked.lengths),
        cap_bytes=asked.cap_bytes,
        shipped=shipped,
        stock=min(times, key=lambda time: time.seconds),
        same=None if judged is None else _time_of(recipe, judged),
        causes=() if gain is None else gain.factors,
        stock_anywhere=min(anywhere, key=lambda time: time.seconds, default=None),
        advised=None if fastest is None else _time_of(recipe, fastest),
        causes_advised=() if advice is None else advice.gain.factors,
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
    """Plan microbatches in 1F1B; with several stages on a rank whole rows in Megatron's interleaved order, which packs them."""
    config = recipe.config
    options = Options(context=budget, recompute=max(map(int, config.layers)) if recipe.recomputes_all else 0)
    if config.virtual == 1:
        return plan_as_given(tuple(map(tuple, rows)), asked.problem(config, ()), asked.costs(config), options).plan
    problem = asked.problem(config, tuple(length for row in rows for length in row))
    return plan(problem, asked.costs(config), replace(options, planner=PLANNER))


def _judged(asked: Question, config: Configuration) -> Judged | None:
    try:
        return exactly(asked, config)
    except InfeasibleError:
        return None


def _advice(asked: Question) -> Advice | None:
    try:
        return advise(asked)
    except NothingFitsError:
        return None


def _time_of_stock(recipe: Recipe, config: Configuration, stock: Stock) -> Time:
    sizes = sizes_of(config.with_layout(stock.layout))
    return Time(seconds=recipe.steps * stock.step_us / MICROSECONDS, peak_bytes=stock.peak_bytes, sizes=sizes)


def _time_of(recipe: Recipe, judged: Judged) -> Time:
    seconds = recipe.steps * judged.parts.step_us / MICROSECONDS
    return Time(seconds=seconds, peak_bytes=judged.peak_bytes, sizes=sizes_of(judged.config))


def rows_of(compared_recipes: Sequence[Compared]) -> Iterator[str]:
    """Yield a table of recipes, and what each differs in from plans."""
    header = (
        "",
        "recipe",
        "measured",
        "as shipped",
        "Megatron's",
        "plans",
        "faster",
        "Megatron's",
        "plans",
        "faster",
        "their sizes",
    )
    lines = []
    for item in compared_recipes:
        recipe = item.recipe
        measured = "" if recipe.measured_s is None else f"{recipe.measured_s:.4g} s"
        cells = [recipe.name, f"{recipe.title}, {sizes_of(recipe.config) or 'one device'}", measured]
        cells.append(f"{item.shipped.seconds:.4g} s")
        pairs = (item.stock, item.same, item.times_same), (item.stock_anywhere, item.advised, item.times_advised)
        for theirs, ours, times in pairs:
            cells += [f"{time.seconds:.4g} s" if time else "-" for time in (theirs, ours)]
            cells.append(f"{times:.2f}x" if times else "")
        sizes = [time.sizes for time in (item.stock_anywhere, item.advised) if time]
        lines.append([*cells, "; ".join(sizes)])
    yield from table(header, lines, left=(0, 1, 10))
    for item in compared_recipes:
        recipe, times = item.recipe, [getattr(item, name) for name in TIMES]
        peaks = ", ".join(f"{time.peak_bytes / 2**30:.0f}" if time else "-" for time in times)
        words = [f"{recipe.repository} {recipe.file} ({recipe.commit})"]
        words += [f"{recipe.sequences:,} sequences, {item.tokens:,} tokens", recipe.lengths.remark]
        words += [recipe.measured] * bool(recipe.measured)
        words += [f"peaks {peaks} of {item.cap_bytes / 2**30:.0f} GiB"]
        words += [f"by cause {_factors(factors)}" for factors in (item.causes, item.causes_advised) if factors]
        words += [f"not in plans: {recipe.lost}"] * bool(recipe.lost)
        words += [f"advise searches with {' '.join(f'{name} {size}' for name, size in recipe.fixed)}"] * bool(recipe.fixed)
        yield f"{recipe.name}: {'; '.join(words)}"
    yield f"causes: {', '.join(CAUSES)}"


def _factors(factors: Sequence[float]) -> str:
    return " ".join("-" if factor is None or math.isinf(factor) else f"{factor:.2f}" for factor in factors)


def row(args: Namespace, recipe: Recipe) -> Figures:
    item = compared(recipe, advises=not args.no_advice)
    times = {name: (time := getattr(item, name)) and asdict(time) for name in TIMES}
    figures = {"tokens": item.tokens, "cap_bytes": item.cap_bytes, "times_same": item.times_same}
    figures |= {name: [*map(_finite, getattr(item, name))] for name in ("causes", "causes_advised")}
    return figures | times | {"times_advised": item.times_advised}


def _finite(factor: float) -> float | None:
    return factor if math.isfinite(factor) else None


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    recipes = {recipe.name: recipe for recipe in RECIPES}
    return "\n".join(
        rows_of(
            [
                Compared(
                    recipe=recipes[row["case"]],
                    tokens=row["tokens"],
                    cap_bytes=row["cap_bytes"],
                    causes=tuple(row["causes"]),
                    causes_advised=tuple(row["causes_advised"]),
                    **{name: row[name] and Time(**row[name]) for name in TIMES},
                )
                for row in rows
            ]
        )
    )


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {recipe.name: recipe for recipe in RECIPES},
    row=row,
    text=text,
    flags={"no-advice": {"action": "store_true", "help": "do not search sizes for recipes"}},
    takes_jobs=True,
)
