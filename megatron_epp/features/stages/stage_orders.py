"""Orders for several stages per rank: list scheduling, and patterns of papers, with windows that follow the slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from megatron_epp.features.stages.list_scheduling import ListScheduling
from megatron_epp.plan import Action, Chunk, Op, PlanError
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.kernels.codes import coded
from megatron_epp.planner.order import Groups, Order, descending, runs_of
from megatron_epp.planner.orders.patterns import by_laps, is_looped, looped, of_laps, one_warm_up
from megatron_epp.planner.orders.warm_up import OrderRule, window_ahead
from megatron_epp.planner.settings import GRAIN, LEAD, REACH, Opening, Orders, ReachRule
from megatron_epp.planner.tables import Tables

BLOCK_PERIOD = 6
"""Units of time between the blocks of a V: F, B and W of two stages, one unit each."""
Units = tuple[int, int, int, int]
"""Units of time at which a rank runs F on its first stage, F and B on its second, and B on its first."""


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Order rule for looped placements: Megatron's interleaved 1F1B (2104.04473) over slices.

    A rank runs as many chunks as there are ranks on its first stage, then on its next, and so on; backwards the other way
    round. Every rank is two backwards ahead of the next. Where that deadlocks, as with chunks that are no multiple of the
    ranks, or unless `elastic`, the warm-up is the paper's (`one_warm_up`); else, and for other placements, it is list
    scheduling.
    """

    elastic: bool = True

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        own, groups = looped(problem), runs_of(chunks, problem)
        orders = [self._order(groups, own)] if is_looped(problem) and self.elastic else []
        orders += [one_warm_up(groups, own)] if is_looped(problem) else []
        return running(orders, chunks, tables, problem)

    def _order(self, groups: Groups, own: Placement) -> Order:
        ranks, laps = own.num_ranks, own.num_chunks
        forwards = by_laps(range(sum(map(len, groups))), ranks, range(laps))
        backwards = by_laps(descending(groups), ranks, range(laps)[::-1])
        at_of, size = {unit: at for at, unit in enumerate(forwards)}, {c: len(group) for group in groups for c in group}
        ahead = [max(at_of[laps - 1, c] + 1, k + (laps - 1) * ranks + size[c]) for k, (_, c) in enumerate(backwards)]
        ahead = list(accumulate(ahead, max))
        leads = [min(2 * (ranks - 1 - rank), len(ahead)) for rank in range(ranks)]
        return of_laps(forwards, backwards, own, [[*ahead[lead:], *[len(forwards)] * lead] for lead in leads])


@dataclass(frozen=True, slots=True)
class Block:
    """Order rule for two stages per rank in a V: a building block of `BLOCKS` repeated for every chunk (2405.15362).

    Where unequal slices make that a deadlock, and for other placements, it is list scheduling. For `minimal` see `WarmUp`.
    """

    name: str
    minimal: bool = False

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        own = Placement("v", problem.num_ranks, 2)
        orders = (self._order(runs_of(chunks, problem), own),) if is_v(problem) else ()
        return running(orders, chunks, tables, problem)

    def _order(self, groups: Groups, own: Placement) -> Order:
        forward_blocks, backward_blocks, total = list[int](), list[int](), sum(map(len, groups))
        for ahead in window_ahead(groups, self.minimal):
            first = max([-1, *forward_blocks[-1:], *backward_blocks[-1:]]) + 1
            forward_blocks += range(first, first + max(0, min(ahead, total) - len(forward_blocks)))
            backward_blocks.append(max(first, *forward_blocks[-1:]))
        ranks = range(own.num_ranks)
        rows = [in_blocks(self.name, own, rank, groups, forward_blocks, backward_blocks) for rank in ranks]
        return tuple(tuple(row[unit] for unit in sorted(row)) for row in rows)


def is_v(problem: Problem) -> bool:
    """Return True if the placement is a V of two stages per rank and the batch is trained on."""
    return problem.placement == Placement("v", problem.num_ranks, 2).rank_of and not problem.forward_only


def in_blocks(
    name: str,
    own: Placement,
    rank: int,
    groups: Groups,
    forward_blocks: Sequence[int],
    backward_blocks: Sequence[int],
) -> dict[int, Action]:
    """Forwards and backwards of a rank by the unit of time in which the block has them, for two stages on each rank in a V.

    `forward_blocks` and `backward_blocks` are the rising numbers of the blocks in which each forward and backward runs.
    """
    (first, second), units = own.stages(rank), BLOCKS[name](rank, own.num_ranks)
    by_unit: dict[int, Action] = {}
    for c, block in enumerate(forward_blocks):
        by_unit[units[0] + BLOCK_PERIOD * block] = Action(Op.F, first, c)
        by_unit[units[1] + BLOCK_PERIOD * block] = Action(Op.F, second, c)
    for c, block in zip(descending(groups), backward_blocks, strict=True):
        by_unit[units[2] + BLOCK_PERIOD * block] = Action(Op.B, second, c)
        by_unit[units[3] + BLOCK_PERIOD * block] = Action(Op.B, first, c)
    return by_unit


def v_min(rank: int, ranks: int) -> Units:
    """Return the units of V-Min, which keeps a third of the activations of 1F1B."""
    idle = 0 if ranks % 3 else 2
    return rank, 2 * ranks - 1 - rank, 2 * ranks + idle + rank, 4 * ranks + idle - 1 - rank


def v_half(rank: int, ranks: int) -> Units:
    """Return the units of V-Half, which keeps half of the activations of 1F1B."""
    idle = 0 if ranks % 2 else 3
    return 2 * rank, 3 * ranks - 2 - rank, 3 * ranks + idle + 2 * rank - 1, 6 * ranks + idle - 2 - rank


def v_zb(rank: int, ranks: int) -> Units:
    """Return the units of V-ZB (ZB-V of 2401.10241), which keeps the activations of 1F1B and has no bubble between its ends."""
    return 4 * rank, 6 * ranks - 5 - 2 * rank, 6 * ranks - 4 + 4 * rank, 12 * ranks - 9 - 2 * rank


BLOCKS: dict[str, Callable[[int, int], Units]] = {"V-Min": v_min, "V-Half": v_half, "V-ZB": v_zb}
"""Building blocks: from a rank and the number of ranks to its units."""


def running(orders: Sequence[Order], chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
    """Return the first order that runs, otherwise list scheduling's. Arguments as in `OrderRule.order`."""
    for order in (coded(actions, len(chunks)) for actions in orders):
        with suppress(PlanError):
            makespan_us(order, tables, [[0] * len(chunks)] * problem.num_stages)
            return order
    return ListScheduling(2, alternating=True).order(chunks, tables, problem)


WIDTHS = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Chunks alive on a rank's first stage, in multiples of the ranks."""
ANYWHERE = {
    "backward": ReachRule(lambda lead, slack: ListScheduling(lead, slack=slack)),
    "turns": ReachRule(lambda lead, slack: ListScheduling(lead, alternating=True, slack=slack)),
}
LOOPED = {"laps": ReachRule(lambda lead, slack: Interleaved(), has_lead=False)}
IN_A_V = {
    "V-Half": ReachRule(lambda lead, slack: Block("V-Half"), has_lead=False),
    "V-Min": ReachRule(lambda lead, slack: Block("V-Min"), has_lead=False),
    "V-ZB": ReachRule(lambda lead, slack: Block("V-ZB", minimal=True), has_lead=False),
}
APART = {
    "apart": ReachRule(lambda lead, slack: ListScheduling(lead, waiting=0.75, slack=slack), splits=True),
    "apart, turns": ReachRule(
        lambda lead, slack: ListScheduling(lead, alternating=True, waiting=0.75, slack=slack), splits=True
    ),
}
"""Orders by name: backwards first, or in turn; Megatron's interleaved one; blocks of the V schedules (2405.15362); the first
two with weight gradients that wait.
"""
OPENINGS = Opening({"lead": 1.0}, scans_grains=True), Opening({"lead": 0.0, "reach": "backward"})
"""Narrower orders (spaced, squeezed blocks) made no plan of 200 batches faster by more than 1.4 %, and searches with a V took
twice as long with them.
"""


def orders_of(problem: Problem) -> Orders:
    of_placement = LOOPED if is_looped(problem) else IN_A_V if is_v(problem) else {}
    stock: list[OrderRule] = [Interleaved(elastic=False)] if is_looped(problem) else []
    widths = (2.0, 1.5, 1.0, 3.0, 2.5, 0.75, 0.5, 0.0)
    return Orders(
        reaches=ANYWHERE | of_placement | APART,
        first_reach="turns",
        leads=WIDTHS,
        openings=OPENINGS,
        with_copies=(REACH, GRAIN, LEAD),
        as_given=ListScheduling(1),
        of_table=(*stock, *(ListScheduling(width, alternating) for width in widths for alternating in (True, False))),
    )
