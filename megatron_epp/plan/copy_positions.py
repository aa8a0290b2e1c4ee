"""Positions among a rank's compute actions at which it issues offloads and loads, one at a time, overlapped with compute.

They determine the memory of copies: a load's is allocated when it is issued, and an offload's released at the `FREE` after it.
So the simulator's memory, lowering and planners all use this module.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.graph import Graph


class CopyTimes(NamedTuple):
    """A copy and its times; `latest` is the index of its chunk's backward among the rank's compute actions."""

    action: Action
    start_us: float
    end_us: float
    latest: int


class CopyPositions(NamedTuple):
    """Indices, in the rank's list, of the compute actions before which a copy is issued and before which it changes the rank's
    memory: a load when it is issued, an offload at its `FREE`. Changes before one action are in the order of their copies.
    """

    issued: int
    changes: int


def copy_positions(start_us: Sequence[float], end_us: Sequence[float], copies: Iterable[CopyTimes]) -> Iterator[CopyPositions]:
    """Yield the positions at which a rank issues its copies, in their order.

    A copy is issued before the compute action that runs, or is the next to run, when it starts, so it can start no later.
    `FREE` is before the first action that starts after the offload has ended. A load is issued after the `FREE` of its own
    chunk even if both fall within one action, a case without benefit, and may then start later than simulated. No copy of a
    chunk is issued after its backward; the times imply that too, unless actions take no time.
    """
    freed: dict[tuple[int, int], int] = {}
    last = last_free = 0
    for (op, stage, chunk), begins_us, ends_us, latest in copies:
        own = freed[stage, chunk] if op is Op.L else 0
        last = min(max(last, bisect_right(end_us, begins_us), own), latest)
        if op is Op.L:
            yield CopyPositions(last, last)
        else:
            freed[stage, chunk] = last_free = min(max(last, last_free, bisect_left(start_us, ends_us)), latest)
            yield CopyPositions(last, last_free)


def place_copies(graph: Graph, start_us: Sequence[float], end_us: Sequence[float], rank: int) -> dict[int, list[Action]]:
    """Copies that a rank issues right before each compute action, by its index, `FREE` included; times are by step number."""
    compute, copies = graph.tracks[rank], graph.tracks[graph.num_ranks + rank]
    placed: dict[int, list[Action]] = defaultdict(list)
    if not copies:
        return placed
    freed: list[tuple[int, Action]] = []  # by index, which only grows
    actions = [graph.steps[number].action for number in copies]
    backwards = [graph.listed.number(Action(Op.B, stage, chunk)) for _, stage, chunk in actions]
    latest = [(compute.stop if number is None else number) - compute.start for number in backwards]
    began, ended = ([column[row.start : row.stop] for row in (compute, copies)] for column in (start_us, end_us))
    ran = map(CopyTimes, actions, began[1], ended[1], latest)
    for action, (issued, changes) in zip(actions, copy_positions(began[0], ended[0], ran), strict=True):
        while freed and freed[0][0] <= issued:
            at, free = freed.pop(0)
            placed[at].append(free)
        placed[issued].append(action)
        if action.op is Op.O:
            freed.append((changes, action._replace(op=Op.FREE)))
    for at, free in freed:
        placed[at].append(free)
    return placed
