"""Schedules: from a chunk table and a number of stages to every rank's list of actions.

A schedule is a function ``(chunks, num_stages, forward_only) -> Order``. Chunk tables are numbered in forward order: the slices
of a sequence stand together, ascending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

from megatron_epp.plan import Action, Chunk, Op

Order = tuple[tuple[Action, ...], ...]
"""The compute actions of every rank, in order."""

CopyOrder = tuple[tuple[tuple[Action, Action | None], ...], ...]
"""Offloads and loads of every rank in order, each with the compute action it waits for besides its own forward or offload."""

Schedule = Callable[[Sequence[Chunk], int, bool], Order]


def slice_groups(chunks: Sequence[Chunk]) -> list[range]:
    """Cut a table in forward order into runs that belong together: the slices of one sequence, or a single batched chunk."""
    starts = [c for c, chunk in enumerate(chunks) if chunk.segments[0].start == 0]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(chunks)], strict=True)]


def elastic_1f1b(chunks: Sequence[Chunk], num_stages: int, forward_only: bool) -> Order:
    """1F1B over slices (Seq1F1B) of sequences with unequal numbers of them (InfiniPipe, section III-D).

    Forwards run sequence by sequence with ascending slices, backwards sequence by sequence with descending slices. Before its
    first backward a rank runs ``num_stages - rank - 1 + n`` forwards, n being the slices of the first sequence, and then keeps
    that many chunks alive: one forward per backward. Where the next sequence has fewer slices than the one whose backward
    just ended, the rank lets the window shrink by as much before it goes on with forwards.

    With one chunk per sequence this is 1F1B. Sequences must come with falling numbers of slices.
    """
    groups = slice_groups(chunks)
    total = len(chunks)
    descending = [c for group in groups for c in reversed(group)]
    window = [len(group) for group in groups for _ in group]
    orders = []
    for stage in range(num_stages):
        forward = [Action(Op.F, stage, c) for c in range(total)]
        if forward_only:
            orders.append(tuple(forward))
            continue
        backward = [Action(Op.B, stage, c) for c in descending]
        actions: list[Action] = []
        run = 0
        for done, behind in enumerate(window):
            ahead = done + num_stages - stage - 1 + behind
            if ahead > run:
                actions += forward[run:ahead]
                run = ahead
            actions.append(backward[done])
        orders.append(tuple(actions))
    return tuple(orders)


@dataclass(frozen=True, slots=True)
class Stairs:
    """A schedule of one stage per rank that is the same on every rank, only earlier by some backwards from rank to rank.

    Before its k-th backward the last rank has run the forwards of the sequence that the backward belongs to and no more
    (`late`), or as many as there are backwards behind it plus that sequence's slices (`elastic_1f1b` does so). A rank r above
    the last runs before its k-th backward what the last rank runs before its backward ``k + slope * r``. So all ranks run their
    forwards in the same runs, and none starves another.

    With `late` the least is alive: while the backwards of a long sequence run, no forwards come in between but those that the
    ranks below need next. A slope of 1 is 1F1B, without any slack: there every difference between two chunks is waited for
    on all ranks. With a slope of 2 a rank has as many chunks waiting for the next as it has ranks below it.

    Attributes:
        late: no forwards ahead of need.
        slope: backwards of lead from a rank to the one above it; at least 1.
    """

    late: bool
    slope: float

    def __call__(self, chunks: Sequence[Chunk], num_stages: int, forward_only: bool) -> Order:
        groups = slice_groups(chunks)
        total = len(chunks)
        if forward_only:
            return tuple(tuple(Action(Op.F, stage, c) for c in range(total)) for stage in range(num_stages))
        descending = [c for group in groups for c in reversed(group)]
        ahead = self._ahead(groups)
        orders = []
        for stage in range(num_stages):
            forward = list(map(Action, repeat(Op.F), repeat(stage), range(total)))
            backward = list(map(Action, repeat(Op.B), repeat(stage), descending))
            lead = math.floor(self.slope * (num_stages - 1 - stage) + 0.5)
            actions: list[Action] = []
            run = 0
            for action, upto in zip(backward, [*ahead[lead:], *[total] * min(lead, total)], strict=True):
                if upto > run:
                    actions += forward[run:upto]
                    run = upto
                actions.append(action)
            orders.append(tuple(actions))
        return tuple(orders)

    def _ahead(self, groups: Sequence[range]) -> list[int]:
        """Forwards that the last rank has run before each of its backwards."""
        if self.late:
            return [group.stop for group in groups for _ in group]
        windows = [len(group) for group in groups for _ in group]
        return list(accumulate((done + window for done, window in enumerate(windows)), max))
