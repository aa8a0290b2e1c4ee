"""Recipes as they ship and with all that Megatron's flags can say, next to what `--epp` alone makes of them, and to plans at
the sizes that suit them best.

Plans have the defaults of a training: what flags leave open of layers, output layer and weight gradients is chosen for other
batches (`tools/layouts/layout_choice.py`), with the caution of a run. Layers that do not divide evenly stay, as flags say them.
Megatron's own schedule has virtual stages, layers, rows and recompute at their best (`tools/advice/causes.py`), with the
recipe's parallel sizes, and with any. Times are by formula, for the same devices and memory. Nothing is fitted to what was
measured.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product, zip_longest

from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Plan
from megatron_epp.plan.placement import placements_of
from megatron_epp.plan.problem import by_count
from megatron_epp.planner import Options, plan
from megatron_epp.planner.microbatches import plan_as_given
from megatron_epp.tools.advice.causes import CAUSES, PLANNER, Gain, Stock
from megatron_epp.tools.advice.configuration_search import Advice, NothingFitsError, advise
from megatron_epp.tools.advice.judge import Judged, choices_of, exactly, shares_by_work, step_without_shards_us
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.cli.planning_flags import cap_of
from megatron_epp.tools.formulas.analytic import MICROSECONDS
from megatron_epp.tools.formulas.library import load_cluster
from megatron_epp.tools.layouts.layout_choice import Sample, settle
from megatron_epp.tools.report.text import table
from scripts.bench.frame import Bench, Figures
from scripts.bench.public.recipes import RECIPES, Recipe
from scripts.bench.public.steps import sizes_of
from scripts.bench.rl.rules import Rows, Rule, balanced, decreasing, padded, verl, work

BATCHES = 8
"""Number of a run's batches for which its defaults are chosen, as in training."""
TIMES = "shipped", "repacked", "stock", "same", "stock_anywhere", "advised"
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
        repacked: the same with the rows that suit it best.
        stock: Megatron's schedule at its best at the recipe's sizes, or `repacked` if that is faster.
        same: our plans at its sizes, with the defaults.
        causes: how much faster each of `CAUSES` makes `same`, over even layers on one stage per rank.
        stock_anywhere: Megatron's schedule at its best at any sizes.
        advised: our plans at the sizes that `advise` finds, weight gradients split where a run chooses so.
        causes_advised: the same of `advised`.
    """

    recipe: Recipe
    tokens: int
    cap_bytes: int
    shipped: Time
    repacked: Time
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
    cluster, trains_all = load_cluster(recipe.cluster), recipe.trained_share == 1
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
        opens_weights=True,
        vocabulary=(False, True) if trains_all else (False,),
    )


def settled(recipe: Recipe, asked: Question) -> Judged | None:
    """Return the plans of the recipe's batch with what `--epp` alone chooses for other batches; None where nothing fits."""
    config, flags = recipe.config, asked.flags
    stages, num_layers = config.stages, int(flags["num_layers"])
    sample = replace(_sample(recipe, asked, config), placements=(stages.placement,))
    layouts = [replace(stages, shards_vocabulary=shards) for shards in sample.vocabulary]
    if num_layers % (config.pipeline * config.virtual) == 0:  # else a flag of the recipe says the layers, which stay
        layouts = []
        if config.virtual == 1:
            open_too = (each for each in placements_of(config.pipeline) if each.num_stages <= num_layers)
            sample = replace(sample, placements=tuple(open_too))
    try:
        _, chosen = settle(sample, tensor_ranks=config.tensor, opens_weights=asked.may_split_weights, layouts=layouts)
        options = replace(asked.options, split_weight=chosen.splits_weights)
        return exactly(replace(asked, options=options), config.with_layout(chosen.layout))
    except InfeasibleError:
        return None


def _sample(recipe: Recipe, asked: Question, config: Configuration) -> Sample:
    """Return a replica's shares of other batches of the run, dealt by count."""
    batches = (recipe.lengths.batch(recipe.sequences, seed) for seed in range(1, BATCHES + 1))
    dealt = ([batch[at] for at in by_count(len(batch), 0, config.data)] for batch in batches)
    problems = dict.fromkeys(asked.problem(config, tuple(lengths)) for lengths in dealt)
    return replace(asked.sample(config, range(1)), problems=tuple(problems))


def compared(recipe: Recipe, *, advises: bool = True) -> Compared:
    """Compare a recipe with plans.

    Args:
        advises: search sizes, too; otherwise there is nothing of other sizes.
    """
    asked = question_of(recipe)
    shipped = as_shipped(recipe, recipe.rule, recipe.budget)
    repacked = best_packed(recipe, shipped, asked.cap_bytes)
    choices = choices_of(asked, recipe.config, shares_by_work(asked, recipe.config), [recipe.config.stages])
    steps = choices.steps()
    best = steps[-1]
    judged = settled(recipe, asked)
    gain = None
    if judged is not None:
        whole_us = step_without_shards_us(asked, judged)
        gain = Gain.of((*steps, choices.by_chunk(best)), whole_us, judged.parts.step_us)
    times = [_time_of_stock(recipe, recipe.config, best)] if best else []
    times.append(repacked)  # it has run, whatever its memory by formula
    advice: Advice | None = None
    with suppress(NothingFitsError):
        advice = advise(asked) if advises else None
    plain = None if advice is None else advice.plain
    anywhere = [] if advice is None else [min(times, key=lambda time: time.seconds)]
    anywhere += [] if plain is None else [_time_of_stock(recipe, plain.config, plain.stock)]
    fastest, causes_advised = None, tuple[float, ...]()
    if advice is not None:
        fastest = min(advice.best, key=lambda each: each.parts.step_us)
        *before, last = advice.gain.factors
        causes_advised = *before, last * advice.best[0].parts.step_us / fastest.parts.step_us
    return Compared(
        recipe=recipe,
        tokens=sum(asked.lengths),
        cap_bytes=asked.cap_bytes,
        shipped=shipped,
        repacked=repacked,
        stock=min(times, key=lambda time: time.seconds),
        same=None if judged is None else _time_of(recipe, judged),
        causes=() if gain is None else gain.factors,
        stock_anywhere=min(anywhere, key=lambda time: time.seconds, default=None),
        advised=None if fastest is None else _time_of(recipe, fastest),
        causes_advised=causes_advised,
    )


def as_shipped(recipe: Recipe, rule: Rule, budget: int) -> Time:
    """Return the time in the recipe's schedule of the replicas with the most work."""
    asked, config = question_of(recipe), recipe.config
    asked = replace(asked, flags=asked.flags | {"epp_loss_block_tokens": 0}, cap_bytes=UNLIMITED_BYTES)
    most = max(asked.lengths) if rule is padded else budget
    shares = balanced(asked.lengths, config.data)
    replicas = [rule(share, most) for share in shares]
    groups = [together([replicas[number] for number in group]) for group in config.lockstep_groups]
    busiest = max(groups, key=lambda rows: sum(work(length) for row in rows for length in row))
    planned = _in_its_schedule(recipe, asked, busiest, most)
    seconds = recipe.steps * (planned.predicted.makespan_us + asked.reduction_us(config)) / MICROSECONDS
    return Time(seconds=seconds, peak_bytes=max(planned.predicted.peak_bytes), sizes=sizes_of(config))


def best_packed(recipe: Recipe, shipped: Time, cap_bytes: int) -> Time:
    """Return the time in the recipe's schedule with rows of whole sequences by any rule, of one to four budgets, that need no
    more memory than the recipe's own or the cap.
    """
    times = [shipped]
    for rule, contexts in product(dict.fromkeys((recipe.rule, decreasing, verl)), (1, 2, 4)):
        time = as_shipped(recipe, rule, contexts * recipe.budget)
        if time.peak_bytes <= max(shipped.peak_bytes, cap_bytes):
            times.append(time)
    return min(times, key=lambda time: time.seconds)


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
        "best rows",
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
        cells += [f"{time.seconds:.4g} s" for time in (item.shipped, item.repacked)]
        pairs = (item.stock, item.same, item.times_same), (item.stock_anywhere, item.advised, item.times_advised)
        for theirs, ours, times in pairs:
            cells += [f"{time.seconds:.4g} s" if time else "-" for time in (theirs, ours)]
            cells.append(f"{times:.2f}x" if times else "")
        sizes = [time.sizes for time in (item.same, item.stock_anywhere, item.advised) if time]
        lines.append([*cells, "; ".join(sizes)])
    yield from table(header, lines, left=(0, 1, 11))
    for item in compared_recipes:
        recipe, times = item.recipe, [getattr(item, name) for name in TIMES]
        peaks = ", ".join(f"{time.peak_bytes / 2**30:.0f}" if time else "-" for time in times)
        words = [f"{recipe.repository} {recipe.file} ({recipe.commit})"]
        words += [f"{recipe.sequences:,} sequences, {item.tokens:,} tokens", recipe.lengths.remark]
        words += [recipe.measured] * bool(recipe.measured)
        words += [f"peaks {peaks} of {item.cap_bytes / 2**30:.0f} GiB"]
        for factors in filter(None, (item.causes, item.causes_advised)):
            shown = ("-" if factor is None or math.isinf(factor) else f"{factor:.2f}" for factor in factors)
            words.append(f"by cause {' '.join(shown)}")
        words += [f"not in plans: {recipe.lost}"] * bool(recipe.lost)
        words += [f"advise searches with {' '.join(f'{name} {size}' for name, size in recipe.fixed)}"] * bool(recipe.fixed)
        yield f"{recipe.name}: {'; '.join(words)}"
    yield f"causes: {', '.join(CAUSES)}"


def row(args: Namespace, recipe: Recipe) -> Figures:
    item = compared(recipe, advises=not args.no_advice)
    times = {name: (time := getattr(item, name)) and asdict(time) for name in TIMES}
    figures = {"tokens": item.tokens, "cap_bytes": item.cap_bytes, "times_same": item.times_same}
    for name in ("causes", "causes_advised"):
        figures[name] = [factor if math.isfinite(factor) else None for factor in getattr(item, name)]
    return figures | times | {"times_advised": item.times_advised}


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
    resumes=True,
    takes_jobs=True,
)
