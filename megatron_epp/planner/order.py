"""Schedules: from a chunk table and a number of stages to every rank's list of actions.

A schedule is a function ``(chunks, num_stages, forward_only) -> Order``. Chunk tables are numbered in forward order: the slices
of a sequence stand together, ascending (`forward_order` makes them so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_epp.schedule import Action, Chunk, Op

Order = tuple[tuple[Action, ...], ...]
"""The compute actions of every rank, in order."""

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
