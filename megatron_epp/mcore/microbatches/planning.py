"""Plans for whole microbatches, the same on every rank."""

from __future__ import annotations

import bisect
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch.distributed as dist

from megatron_epp.cost import Costs, causal_pairs
from megatron_epp.mcore.microbatches.source import Microbatch
from megatron_epp.plan import UNLIMITED_BYTES, Action, Chunk, EppError, Op, Plan, Segment, from_json, to_json
from megatron_epp.planner import ListScheduling, Options, Problem, elastic_1f1b, fitted, plan, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.given_order import in_given_order
from megatron_epp.planner.local_search import SMALL
from megatron_epp.planner.messages import planned_with_room
from megatron_epp.planner.orders.warm_up import OneStagePerRank
from megatron_epp.runtime.links.objects import ObjectGroup

logger = logging.getLogger(__name__)

_STEPS = 500
"""Steps of local search, 25 ms for 16 microbatches on two stages. There 20,000 gain 1 % more in the time of an iteration."""

Shapes = tuple[Microbatch, ...]


class Found(NamedTuple):
    """Microbatches of an iteration, as one rank has found them.

    Attributes:
        shapes: of the microbatches; None if the caller has no data on this rank.
        problem: error in finding them; empty if there was none.
        position: of this rank in the pipeline.
        num_bytes: of microbatches that this rank holds on its device during the iteration.
        replica: number of this rank's replica.
    """

    shapes: Shapes | None
    problem: str
    position: int
    num_bytes: int = 0
    replica: int = 0


class Agreed(NamedTuple):
    """Microbatches of an iteration, as all ranks that run the same plan know them.

    Attributes:
        shapes: of the microbatches; where replicas that share experts have different ones, shapes with the most tokens and the
            most pairs of a query and a key that any of them has.
        num_bytes: of microbatches on the device throughout the iteration, per pipeline rank; the most of its replicas.
        own: of this replica's microbatches; empty if they are `shapes`.
    """

    shapes: Shapes
    num_bytes: tuple[int, ...]
    own: Shapes = ()

    @property
    def here(self) -> Shapes:
        """Shapes of this replica's microbatches."""
        return self.own or self.shapes


class Planned(NamedTuple):
    """A plan of whole microbatches.

    Attributes:
        plan: the plan, a chunk per microbatch.
        order: the microbatch of every chunk.
    """

    plan: Plan
    order: tuple[int, ...]

    def of(self, shapes: Shapes) -> Planned:
        """Return the same order, recompute and offload for other microbatches, none of which has more tokens or pairs.

        The plan's times are those of the microbatches that it was made for: a replica that shares experts waits for others'.
        """
        chunks, lengths = _table(shapes)
        return self._replace(plan=replace(self.plan, lengths=lengths, chunks=tuple(chunks[index] for index in self.order)))


def plan_microbatches(shapes: Shapes, problem: Problem, costs: Costs, options: Options) -> Planned:
    """Plan whole microbatches in the best of three orders: as given, longest first, and shortest first.

    Args:
        costs: time and memory of every stage.
        options: of the planner; options of cutting and packing are ignored.

    Raises:
        InfeasibleError: nothing that was tried fits the caps.
    """
    chunks, problem = _chunks(shapes, problem)
    numbers = tuple(number for number, one in enumerate(shapes) for _ in one.lengths)
    is_small = problem.num_stages * len(chunks) <= SMALL
    asked = replace(options, chunk_tokens=None, slices=None, steps=_STEPS if is_small else 0, budget_ms=None if is_small else 0)
    best = plan(replace(problem, microbatches=numbers), costs, asked)
    return Planned(best, tuple(chunks.index(chunk) for chunk in best.chunks))


def plan_as_given(shapes: Shapes, problem: Problem, costs: Costs, options: Options) -> Planned:
    """Plan whole microbatches in the caller's order and in 1F1B, without caps: no more are alive than in Megatron's schedules.

    Arguments as in `plan_microbatches`.
    """
    chunks, problem = _chunks(shapes, replace(problem, cap_bytes=(UNLIMITED_BYTES,) * problem.num_ranks))
    rule = OneStagePerRank(elastic_1f1b) if problem.has_one_stage_per_rank else ListScheduling(1)
    order = rule.order(chunks, tabulate(chunks, problem, costs), problem)
    if options.split_weight and costs.splits_weight:  # W right behind B: it is measured, and nothing more is kept
        order = tuple(tuple(one for action in row for one in _with_weight(action)) for row in order)
    made = build_plan(problem, costs, options, fitted(order, chunks, problem, costs, options))
    return Planned(made, tuple(range(len(chunks))))


def plan_in_order(shapes: Shapes, problem: Problem, costs: Costs, options: Options, plain: bool) -> Planned:
    """Plan whole microbatches so that every stage runs forwards and backwards in the caller's order (`in_given_order`).

    Args:
        shapes, problem, costs, options: as in `plan_microbatches`.
        plain: as `plan_as_given` does: in 1F1B and without caps.

    Raises:
        InfeasibleError: it does not fit the caps.
    """
    if plain:
        problem = replace(problem, cap_bytes=(UNLIMITED_BYTES,) * problem.num_ranks)
    chunks, problem = _chunks(shapes, problem)

    def make(asked: Problem) -> Plan:
        return build_plan(asked, costs, options, in_given_order(chunks, asked, costs, options, plain))

    return Planned(planned_with_room(problem, costs, options, make), tuple(range(len(chunks))))


def _with_weight(action: Action) -> tuple[Action, ...]:
    return (action, action._replace(op=Op.W)) if action.op is Op.B else (action,)


def _chunks(shapes: Shapes, problem: Problem) -> tuple[tuple[Chunk, ...], Problem]:
    """Return a chunk per microbatch, and the problem with their sequences."""
    chunks, lengths = _table(shapes)
    return chunks, replace(problem, lengths=lengths)


def _table(shapes: Shapes) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    lengths = tuple(length for one in shapes for length in one.lengths)
    segments = [Segment(sequence, 0, length) for sequence, length in enumerate(lengths)]
    ends = accumulate((len(one.lengths) for one in shapes), initial=0)
    return tuple(Chunk(tuple(segments[start:end])) for start, end in pairwise(ends)), lengths


def agree_on_shapes(found: Found, group: ObjectGroup) -> Agreed:
    """Return the iteration's microbatches, known to every rank of a pipeline. A collective call on the CPU.

    Args:
        group: all ranks that run the same plan: one replica's, or all ranks of replicas that share experts.

    Raises:
        EppError: on every rank: a rank failed, no rank has data, ranks of a replica have different microbatches, or replicas
            that share experts different numbers of them.
    """
    everyone = group.from_each((found, dist.get_rank()))
    if failed := [f"rank {rank}: {one.problem}" for one, rank in everyone if one.problem]:
        raise EppError("; ".join(failed))
    known = [(one.shapes, one.replica, rank) for one, rank in everyone if one.shapes is not None]
    if not known:
        raise EppError("no rank of this pipeline has a data iterator, so lengths of microbatches are unknown")
    replicas: dict[int, tuple[Shapes, int]] = {}
    for shapes, replica, rank in known:
        first, first_rank = replicas.setdefault(replica, (shapes, rank))
        if shapes != first:
            raise EppError(f"microbatches differ between ranks of a replica: {_difference(first, first_rank, shapes, rank)}")
    (first, first_rank), *others = replicas.values()
    for shapes, rank in others:
        if len(shapes) != len(first):
            difference = _difference(first, first_rank, shapes, rank)
            raise EppError(
                f"replicas that share experts run the same actions, and have other numbers of microbatches: {difference}. Give "
                "them as many; keep experts within a replica (EP x ETP at most TP x CP); or use Megatron's own schedule"
            )
    of_all = tuple(map(_largest, zip(*(shapes for shapes, _ in replicas.values()), strict=True)))
    own = replicas[found.replica][0] if found.replica in replicas else of_all
    num_bytes: dict[int, int] = {}
    for one, _ in everyone:
        num_bytes[one.position] = max(one.num_bytes, num_bytes.get(one.position, 0))
    sizes = tuple(num_bytes[position] for position in sorted(num_bytes))
    return Agreed(of_all, sizes, () if own == of_all else own)


def _largest(shapes: Shapes) -> Microbatch:
    """Return the shape of a microbatch with the most tokens and the most pairs that one of these has.

    It is one of them, or has two sequences.
    """
    best = max(shapes, key=lambda one: (sum(one.lengths), _pairs(one.lengths)))
    tokens, pairs = sum(best.lengths), max(_pairs(one.lengths) for one in shapes)
    if pairs <= _pairs(best.lengths):
        return best
    longest = range(-(-tokens // 2), tokens + 1)
    at = bisect.bisect_left(longest, pairs, key=lambda long: _pairs((long, tokens - long)))
    return best._replace(lengths=tuple(filter(None, (longest[at], tokens - longest[at]))))


def _pairs(lengths: Iterable[int]) -> int:
    return sum(causal_pairs(0, length) for length in lengths)


def _difference(first: Shapes, first_rank: int, other: Shapes, rank: int) -> str:
    if len(first) != len(other):
        return f"rank {first_rank} has {len(first)}, rank {rank} has {len(other)}"
    index = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    ones = (sum(first[index].lengths), len(first[index].lengths), sum(other[index].lengths), len(other[index].lengths))
    return "microbatch {} has {} tokens in {} sequences on rank {} and {} in {} on rank {}".format(
        index, *ones[:2], first_rank, *ones[2:], rank
    )


def agree_on_plan(make: Callable[[], Planned], group: ObjectGroup) -> Planned:
    """Plan on every rank and return the same plan on all: the plan of the group's first rank if they differ.

    A collective call on the CPU. Raises `EppError` on every rank if planning fails on one.
    """
    made, problem = None, ""
    try:
        made = make()
    except Exception as error:  # a rank that raised by itself would leave the others waiting for its digest
        problem = str(error) if isinstance(error, EppError) else f"{type(error).__name__}: {error}"
    text = "" if made is None else to_json(made.plan)
    digests = group.from_each((hashlib.sha256(text.encode()).hexdigest(), problem))
    if failed := next((text for _, text in digests if text), ""):
        raise EppError(failed)
    assert made is not None
    if len({digest for digest, _ in digests}) == 1:
        return made
    if group.is_first:
        logger.warning("ranks of a pipeline made different plans from equal inputs; all use the first rank's")
    text, order = group.from_first([text, made.order])
    return Planned(from_json(text), tuple(order))
