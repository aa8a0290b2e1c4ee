"""The proof that a plan can run: complete, free of deadlock, in slice order, inside its memory, and true to its word."""

from __future__ import annotations

from megatron_epp.schedule.check_actions import check_links, check_order, check_presence
from megatron_epp.schedule.check_memory import check_memory
from megatron_epp.schedule.check_predicted import check_predicted
from megatron_epp.schedule.check_tables import check_hosted, check_tables, check_tokens
from megatron_epp.schedule.graph import build_graph
from megatron_epp.schedule.plan import Plan
from megatron_epp.schedule.simulate import Timeline, play, timeline_of
from megatron_epp.schedule.violation import Violation, report

__all__ = ["Violation", "check", "examine", "report"]


def check(plan: Plan) -> list[Violation]:
    """Find what is wrong with a plan; nothing when it is sound.

    The questions build on each other, and a layer is only asked when those before it found nothing:

    1. tables have the right shapes and ranges;
    2. every token is in exactly one chunk, and every action is there once, on its rank;
    3. the order is possible: no action before one it needs, no cycle across ranks, no crossed messages;
    4. memory: nothing freed twice, early or never, and no rank above its cap, or with more at the host than it may have;
    5. what is predicted is what the simulator finds from the steps' own times and bytes, and no bound is above that; a plan
       that predicts nothing (`Prediction.none`) passes.

    Returns:
        every violation of the first layer that has any, each with rank, position and reason. It raises nothing.
    """
    return examine(plan)[0]


def examine(plan: Plan) -> tuple[list[Violation], Timeline | None]:
    """`check`, and the timeline that it made on the way; none where it did not come that far."""
    if faults := list(check_tables(plan)):
        return faults, None
    if faults := [*check_tokens(plan), *check_presence(plan)]:
        return faults, None
    if faults := list(check_hosted(plan)):
        return faults, None
    graph = build_graph(plan)
    played = play(graph)
    if faults := [*check_order(plan, graph, played), *check_links(plan)]:
        return faults, None
    timeline = timeline_of(plan, graph, played)
    return list(check_memory(timeline)) or list(check_predicted(timeline)), timeline
