"""Where a rank issues its offloads and loads, which run one at a time beside compute, among its compute actions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict

from megatron_epp.schedule.action import Action, Op
from megatron_epp.schedule.graph import Graph
from megatron_epp.schedule.simulate import Playback


def place_copies(graph: Graph, played: Playback, rank: int) -> dict[int, list[Action]]:
    """What to issue right before a step, by the step's number.

    A copy stands before the compute action that runs, or is the next to run, when it starts in the simulation: so it starts
    no later. `FREE`, which gives back what an offload has moved, stands before the first action that starts when the offload
    has ended; and a load that starts behind that end waits for it, since it may need the memory. So at no action does the
    rank hold more than in the simulation.

    No copy of a chunk stands behind its backward. Times say so too, unless actions take none.
    """
    compute, copies = graph.tracks[rank], graph.tracks[graph.num_ranks + rank]
    starts, ends = ([times[number] for number in compute] for times in (played.start_us, played.end_us))
    placed: dict[int, list[Action]] = defaultdict(list)
    freed: list[tuple[int, Action]] = []  # by place, which only grows
    last = last_free = 0
    for number in copies:
        op, stage, chunk = action = graph.steps[number].action
        latest = graph.index[Action(Op.B, stage, chunk)] - compute.start
        last = min(max(last, bisect_right(ends, played.start_us[number]), last_free if op is Op.L else 0), latest)
        while freed and freed[0][0] <= last:
            at, free = freed.pop(0)
            placed[compute.start + at].append(free)
        placed[compute.start + last].append(action)
        if op is Op.O:
            last_free = min(max(last, last_free, bisect_left(starts, played.end_us[number])), latest)
            freed.append((last_free, action._replace(op=Op.FREE)))
    for at, free in freed:
        placed[compute.start + at].append(free)
    return placed
