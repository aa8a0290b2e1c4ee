"""Evaluation of a configuration: whether it fits, and the parts of the time of a training step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import NamedTuple

from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.plan_figures import busy_us
from megatron_epp.plan.problem import Problem, Share, by_count
from megatron_epp.plan.units import format_gib
from megatron_epp.planner import plan
from megatron_epp.planner.estimate import about_us, estimate_us, rough_plan
from megatron_epp.planner.least import one_order_decides, proven
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.service.replica_balance import divide, sequence_work
from megatron_epp.planner.validation import static_bytes
from megatron_epp.tools.advice.causes import STAGES_PER_RANK, Stock, StockChoices, without_shards
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.formulas.analytic import exchange_line

_EXCHANGES = 8
"""Largest number of exchanges of sequences between replicas, judged by estimates, before their shares are planned."""
_PLANNED = 4  # largest number of groups of replicas of a configuration that are planned: the ones estimated to take longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of the time of a step in microseconds, as means over all devices."""

    compute_us: float  # compute without recompute and without exchanges
    exchange_us: float  # between the ranks that share a layer
    recompute_us: float  # recompute in backward
    bubble_us: float  # ranks of a pipeline wait for each other
    waiting_us: float  # replicas wait for the slowest
    reduction_us: float  # reduction of gradients, and gathering of weights

    @property
    def step_us(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, slots=True)
class Judged:
    """A configuration that fits, and the plan of its slowest replica: as in training if `is_exact`, else the best of a few."""

    config: Configuration
    parts: Parts
    plan: Plan
    is_exact: bool

    @property
    def peak_bytes(self) -> int:
        return max(self.plan.predicted.peak_bytes)


@dataclass(frozen=True, slots=True)
class Misfit:
    name: str  # of a configuration, or of a size that several configurations have in common
    why: str  # reason in words, with numbers
    needed_bytes: int = 0  # sufficient memory; 0 if memory is not the reason
    config: Configuration | None = None  # the configuration; None for a size


class Baseline(NamedTuple):
    """Megatron's own 1F1B at the parallel sizes, and with the layers and virtual stages, that suit it best."""

    config: Configuration
    stock: Stock


def misfit(question: Question, config: Configuration) -> Misfit | None:
    """Return the refusal if weights and optimizer, or a sequence as long as the context, do not fit; None if they do."""
    costs, cap, problem = question.costs(config), question.cap_bytes, question.problem(config, (question.context,))
    static = static_bytes(problem, costs)
    if max(static) > cap:
        why = f"weights and optimizer alone need {format_gib(max(static), cap)} of {format_gib(cap, max(static))}"
        return Misfit(config.name, why, max(static), config)
    try:
        try:
            estimate_us(problem, costs, question.options)
        except InfeasibleError:  # an estimate proves that a batch fits; where it fits no cap, a plan may
            (proven if one_order_decides(problem, question.options) else plan)(problem, costs, question.options)
    except InfeasibleError as error:
        needed = error.least_cap_bytes
        why = f"a sequence of {question.context:,} tokens needs {format_gib(needed, cap)} of {format_gib(cap, needed)}, "
        why += f"{format_gib(max(static))} of it for weights and optimizer"
        return Misfit(config.name, why + ", without offload" * (not question.options.offload), needed, config)
    return None


def shares_by_work(question: Question, config: Configuration) -> tuple[Share, ...]:
    """Divide the batch by work alone, the replica with the most work first."""
    alone = tuple((replica,) for replica in range(config.data))
    by_work = divide(question.batch(config), question.costs(config), alone, lambda _: 0.0, tries=0)
    work_us = _loads_us(question, config, by_work.shares)
    return tuple(by_work.shares[r] for r in sorted(range(config.data), key=lambda r: (-work_us[r], r)))


def _loads_us(question: Question, config: Configuration, shares: Sequence[Share]) -> list[float]:
    work_us = sequence_work(question.batch(config), question.costs(config))
    return [sum(work_us[at] for at in share) for share in shares]


def roughly(question: Question, config: Configuration, shares: Sequence[Share]) -> Judged:
    """Evaluate by a rough plan of the replica with the most work, which is the first. Raises `InfeasibleError`."""
    costs, problem = question.costs(config), question.problem_of(config, shares[0])
    try:
        result = rough_plan(problem, costs, question.options)
    except InfeasibleError:
        result = plan(problem, costs, question.options)
    return Judged(config, _parts(question, config, result, _loads_us(question, config, shares)), result, is_exact=False)


def exactly(question: Question, config: Configuration) -> Judged:
    """Evaluate by the plans that training would run. Raises `InfeasibleError`."""
    costs, problem = question.costs(config), question.batch(config)

    def group_us(problems: Sequence[Problem]) -> float:
        return max(about_us(problem, costs, question.options) for problem in problems)

    division = divide(problem, costs, config.lockstep_groups, group_us, _EXCHANGES)
    times_us = division.makespan_us
    slowest: Plan | None = None
    for group in sorted(config.lockstep_groups, key=lambda group: (-times_us[group[0]], group))[:_PLANNED]:
        if slowest is not None and times_us[group[0]] <= slowest.predicted.makespan_us:
            break
        problems = [problem.part(division.shares[replica]) for replica in group]
        alone = len(problems) == 1
        plans = (plan(problems[0], costs, question.options),) if alone else plan_lockstep(problems, costs, question.options)
        slowest = max((*([slowest] if slowest else []), *plans), key=lambda result: result.predicted.makespan_us)
    assert slowest is not None  # there is always one
    return Judged(config, _parts(question, config, slowest, times_us), slowest, is_exact=True)


def choices_of(
    question: Question, config: Configuration, shares: Sequence[Share], layouts: Iterable[Layout] = ()
) -> StockChoices:
    """Return what Megatron's own 1F1B may have, in its favour: replicas that share experts do not wait for others' rows."""
    even = Layout(even_layers(int(question.flags["num_layers"]), config.pipeline), Placement("looped", config.pipeline, 1))
    config = config.with_layout(even)
    dealt = [by_count(len(question.lengths), replica, config.data) for replica in range(config.data)]
    whole = replace(question, flags=question.flags | {"epp_loss_block_tokens": 0}, borrowed=())
    loads_us = _loads_us(replace(question, borrowed=()), config, dealt)
    heaviest = dict.fromkeys((dealt[loads_us.index(max(loads_us))], tuple(sorted(shares[0]))))
    sizes = replace(config, latents="off" if question.flags.get("multi_latent_attention") else "")
    most = question.fixed.get("virtual", max(STAGES_PER_RANK))
    return StockChoices(
        problems=tuple(whole.problem_of(config, share) for share in heaviest),
        costs_of=cache(lambda layout: whole.costs(sizes.with_layout(layout))),
        own_costs_of=cache(lambda layout: question.costs(config.with_layout(layout))),
        num_layers=int(question.flags["num_layers"]),
        context=question.context,
        options=question.options,
        even=even,
        counts=[count for count in {*STAGES_PER_RANK, most} if count <= most],
        layouts=tuple(layouts),
        added_us=cache(lambda layout: question.reduction_us(config.with_layout(layout))),
    )


def step_without_shards_us(question: Question, judged: Judged) -> float:
    """Return the time of a step with the vocabulary on the last stage, weight gradients within backwards and nothing shared."""
    config, asked = judged.config, replace(question, options=replace(question.options, split_weight=False), borrowed=())
    if not config.shards_vocabulary and asked == question:
        return judged.parts.step_us
    sample = asked.sample(config, range(len(question.lengths)))
    return least_step_us(asked, map(config.with_layout, without_shards(config.stages, sample.problems[0], sample.costs_of)))


def least_step_us(question: Question, configs: Iterable[Configuration]) -> float:
    """Return the least time of a step of several configurations; infinite if none fits."""
    times_us = [math.inf]
    for config in configs:
        with suppress(InfeasibleError):
            times_us.append(exactly(question, config).parts.step_us)
    return min(times_us)


def _parts(question: Question, config: Configuration, result: Plan, times_us: Sequence[float]) -> Parts:
    """Compute the parts of a step from the plan of the slowest replica; only ratios of the replicas' times count."""
    mean = sum(times_us) / len(times_us) / max(times_us)
    shape, ranks = question.shape(config), result.num_ranks
    makespan_us = result.predicted.makespan_us
    busy = sum(busy_us(result, rank) for rank in range(ranks)) / ranks
    recompute_us, passes = sum(map(sum, result.recompute_us)) / ranks, 2 * shape.num_layers / config.pipeline
    token_us = exchange_line(shape.exchanges, question.rates).per_token_us
    exchange_us = min(busy - recompute_us, result.num_tokens * token_us * passes)
    return Parts(
        compute_us=mean * (busy - recompute_us - exchange_us),
        exchange_us=mean * exchange_us,
        recompute_us=mean * recompute_us,
        bubble_us=mean * max(0.0, makespan_us - busy),
        waiting_us=(1 - mean) * makespan_us,
        reduction_us=question.reduction_us(config),
    )
