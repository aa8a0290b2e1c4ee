"""Seeded problems for the campaign: batches, pipelines, costs and settings of every kind, with caps at and below the least."""

import random
from dataclasses import dataclass, replace

from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import UNLIMITED_BYTES, EppError, InfeasibleError, Plan
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import OWN
from megatron_epp.plan.problem import Spans, TokenSpan
from megatron_epp.planner import PLANNERS, Options, Problem, plan
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_profile, on_device

HIDDEN, HEADS, HEAD_GROUPS = 256, 8, 2
OTHERS = tuple(sorted(set(PLANNERS) - {"greedy", "milp"}))
"""Planners but the exact one, which takes seconds."""
SMALL_LENGTHS, SMALL_STAGES = 5, 4
"""Most sequences and stages of the cases that the exact planner gets."""
OVERLAPPING, EXCHANGED = 0.15, 0.3
"""Share of the cases in which exchanges may be overlapped, and of a layer's forward that is exchange there."""


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of `plan`, or of `plan_lockstep` with problems of `others`: replicas that share experts."""

    problem: Problem
    costs: PipelineCosts
    options: Options
    others: tuple[Problem, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.problem, *self.others


def case_of(seed: int) -> Case:
    """Draw the case of a seed. Its cap is drawn between nothing and more than the plan without a cap needs.

    Whether exchanges are overlapped is drawn apart, so that the other cases stay those of earlier runs.
    """
    draw, overlaps = random.Random(seed), random.Random(-1 - seed).random() < OVERLAPPING
    planner = "greedy" if draw.random() < 0.6 else draw.choice(OTHERS)
    ranks, chunks = draw.choice([1, 2, 2, 3, 4, 4, 6, 8]), draw.choice([1, 1, 1, 2, 2, 3])
    placement = Placement(draw.choice(["v", "looped"]) if chunks > 1 else "looped", ranks, chunks)
    forward_only = draw.random() < 0.08
    options = Options(
        planner=planner,
        split_weight=draw.random() < 0.35,
        offload=draw.random() < 0.3,
        kv_offload=draw.random() < 0.8,
        slices=draw.choice([None, None, None, 1, 2, 3, 8]),
        chunk_tokens=draw.choice([None, None, None, 1000, 4000]),
        recompute=draw.choice(["auto", "auto", "auto", "auto", 0, 1, 99]),
        recompute_modes=draw.choice(["all", "full"]),
        steps=draw.choice([0, 0, 0, 200]),
        overlap_exchanges=overlaps,
    )
    problem = Problem(
        lengths=lengths_of(draw),
        placement=placement.rank_of,
        cap_bytes=(UNLIMITED_BYTES,) * ranks,
        token_multiple=draw.choice([1, 1, 2, 16, 128]),
        forward_only=forward_only,
    )
    costs = costs_of(draw, placement)
    return _capped(draw, Case(problem, _exchanging(costs) if overlaps else costs, options))


def exact_case_of(seed: int) -> Case | None:
    """Return the case of a seed for the exact planner; None where it would take it long."""
    case = case_of(seed)
    if len(case.problem.lengths) > SMALL_LENGTHS or case.problem.num_stages > SMALL_STAGES:
        return None
    return replace(case, options=replace(case.options, planner="milp"))


def demanding_case_of(seed: int) -> Case:
    """Return the case of a seed that asks for more: loss groups, spans, little memory at the host, replicas in lockstep."""
    draw, case = random.Random(seed), case_of(seed)
    asked, options = case.problem, replace(case.options, offload=draw.random() < 0.6)
    in_groups, has_spans, is_lockstep = (draw.random() < share for share in (0.5, 0.4, 0.4))
    if draw.random() < 0.4:
        asked = replace(asked, host_cap_bytes=draw.choice([10**6, 10**7, 10**8]))
    if is_lockstep or (in_groups and not asked.has_one_stage_per_rank):
        options = replace(options, planner="greedy", overlap_exchanges=False)
    elif in_groups:
        options = replace(options, planner=draw.choice(["greedy", *OWN]))
    batches = [asked.lengths, *(_like(draw, asked.lengths) for _ in range(draw.randint(1, 2) * is_lockstep))]
    first, *others = (
        replace(
            asked,
            lengths=lengths,
            loss_groups=_groups_of(draw, len(lengths)) if in_groups else (),
            spans=tuple(spans_of(draw, length) for length in lengths) if has_spans else (),
        )
        for lengths in batches
    )
    unlimited = (UNLIMITED_BYTES,) * asked.num_ranks
    return _capped(draw, with_caps(Case(first, case.costs, options, tuple(others)), unlimited))


def _like(draw: random.Random, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths of another replica: with batches that have little in common, chunks are aligned for minutes."""
    return tuple(1 + int(length * draw.uniform(0.5, 1.5)) for length in lengths)


def _groups_of(draw: random.Random, sequences: int) -> tuple[int, ...]:
    groups: list[int] = []
    while len(groups) < sequences:
        groups += [len(groups)] * draw.randint(1, 4)
    groups = groups[:sequences]
    draw.shuffle(groups)
    return tuple(groups)


def spans_of(draw: random.Random, length: int, work: float = 1.0, most_tokens: int = 900) -> Spans:
    """Spans that leave little between them, with the work of so many tokens for each of theirs."""
    spans, at = [], draw.randrange(40)
    while (end := at + draw.randrange(1, most_tokens)) < length:
        spans.append(TokenSpan(at, end, work * (end - at), 0.5 * work * (end - at)))
        at = end + draw.choice((0, 1, 5, 200))
    return tuple(spans)


def lengths_of(draw: random.Random) -> tuple[int, ...]:
    """Up to 12 sequences, from one token to some ten thousand; sometimes many of equal length."""
    if draw.random() < 0.15:
        return (draw.choice([1, 500, 4096]),) * draw.randint(1, 16)
    return tuple(1 + int(draw.lognormvariate(6.5, 1.8)) % 60000 for _ in range(draw.randint(1, 12)))


def costs_of(draw: random.Random, placement: Placement) -> PipelineCosts:
    """Costs of stages with layers, or without; with the vocabulary on the last stage or in shards, some of zero."""
    stages, ranks = placement.num_stages, placement.num_ranks
    layers = [draw.choice([1, 2, 2, 3, 4]) for _ in range(stages)]
    if stages > 1 and draw.random() < 0.25:
        layers[draw.randrange(stages)] = 0
    shape = ModelShape(
        num_layers=sum(layers),
        hidden_size=HIDDEN,
        ffn_hidden_size=draw.choice([512, 1024]),
        num_attention_heads=HEADS,
        num_query_groups=HEAD_GROUPS,
        vocab_size=draw.choice([512, 32000]),
    )
    shares: tuple[float, ...] = ()
    if draw.random() < 0.25:
        parts = [draw.choice([0.0, 1.0, 1.0, 2.0]) for _ in range(ranks)]
        shares = tuple(part / sum(parts) for part in parts) if sum(parts) else ()
    profile = analytic_profile(shape, draw.choice([H100, CPU]))
    costs = profile.costs(layers, state_bytes_per_parameter=draw.choice([0.0, 8.0]), vocabulary_shares=shares)
    costs = replace(
        costs, offloadable_share=draw.choice([0.0, 1e-9, 0.5, 0.9, 1.0]), host_us_per_byte=draw.choice([0.0, 1e-6, 1e-4])
    )
    return on_device(costs) if draw.random() < 0.5 else costs


def _exchanging(costs: PipelineCosts) -> PipelineCosts:
    """Return costs of which a part of every layer's pass is exchange between tensor-parallel ranks."""
    stages = (own.changed(LAYER, exchange=LinearTime(0.0, EXCHANGED * own.layers.forward.per_token_us)) for own in costs.stages)
    return replace(costs, stages=tuple(stages))


def _capped(draw: random.Random, case: Case) -> Case:
    """Give the ranks a cap: none, the least that an error names, a byte less, or a share of what the plan needs without one."""
    kind = draw.choice(["none", "least", "below", "share", "share", "unequal"])
    if kind == "none":
        return case
    ranks = case.problem.num_ranks
    try:
        if kind in ("least", "below"):
            least = least_cap_bytes(case)
            return with_caps(case, (least - (kind == "below"),) * ranks) if least else case
        free = plans_of(case)
    except EppError:
        return case
    most, static = max(max(made.predicted.peak_bytes) for made in free), max(free[0].static_bytes)
    shares = [draw.uniform(0.0, 1.1)] * ranks if kind == "share" else [draw.uniform(0.2, 1.1) for _ in range(ranks)]
    return with_caps(case, tuple(static + int((most - static) * share) for share in shares))


def with_caps(case: Case, cap_bytes: tuple[int, ...]) -> Case:
    first, *others = (replace(asked, cap_bytes=tuple(max(1, cap) for cap in cap_bytes)) for asked in case.problems)
    return replace(case, problem=first, others=tuple(others))


def least_cap_bytes(case: Case) -> int:
    """Return the least cap that an error names if there is a byte of memory; 0 if memory is not the obstacle."""
    try:
        plans_of(with_caps(case, (1,) * case.problem.num_ranks))
    except InfeasibleError as error:
        return error.least_cap_bytes
    return 0


def planned(case: Case) -> Plan:
    return plans_of(case)[0]


def plans_of(case: Case) -> tuple[Plan, ...]:
    if case.others:
        return plan_lockstep(case.problems, case.costs, case.options)
    return (plan(case.problem, case.costs, case.options),)
