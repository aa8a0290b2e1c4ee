"""Verification of a plan: complete, free of deadlock, in slice order, within its memory, and with consistent predictions."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.plan.columns import columns_of, listed
from megatron_epp.plan.graph import linked
from megatron_epp.plan.launches import Launches, Rows
from megatron_epp.plan.lowering import issue_order
from megatron_epp.plan.message_slots import check_messages
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.proof.actions import check_links, check_order, check_presence
from megatron_epp.plan.proof.deadlock import check_launches, check_own_messages
from megatron_epp.plan.proof.memory_balance import check_memory
from megatron_epp.plan.proof.plan_tables import check_extensions, check_kv_offload, check_predicted, check_tables, check_tokens
from megatron_epp.plan.simulation import Timeline, play, timeline_of
from megatron_epp.plan.violation import Violation, report

__all__ = ["Examined", "Violation", "check", "examine", "report"]


class Examined(NamedTuple):
    """Findings of `check` with its intermediate results; None for results that it did not reach."""

    faults: list[Violation]
    timeline: Timeline | None = None
    launches: Launches | None = None


def check(plan: Plan, rows: Rows | None = None) -> list[Violation]:
    """Prove a plan, or find its violations: an empty list proves that it is complete, cannot hang and fits its caps.

    The checks build on each other, and each of the following is made only if the checks before it found nothing:

    1. tables have the right shapes and ranges;
    2. every token is in exactly one chunk, and every action occurs once, on its rank; groups of context-parallel ranks are
       disjoint and have room for their sequences;
    3. the order is possible: no action before one it needs, no cycle across ranks, no crossed messages; and the lowered plan
       cannot hang, however launches queue on the devices (`deadlock`);
    4. memory: nothing freed twice, early or never, no rank above its cap or its host memory cap, and no more messages in
       flight than memory is reserved for;
    5. predictions equal what the simulator finds from the steps' own times and bytes, and the lower bound is not above that; a
       plan without predictions (`Prediction.none`) passes.

    Args:
        rows: launches of every rank that are to be proven in place of the lowered plan, with messages of their own. These are
            the messages that the plan needs, each after the action that makes it and before the one that takes it.

    Returns:
        every violation of the first check that has any, each with rank, position and reason. It raises nothing.
    """
    return examine(plan, rows).faults


def examine(plan: Plan, rows: Rows | None = None) -> Examined:
    columns = columns_of(plan)
    if faults := list(check_tables(plan, columns)):
        return Examined(faults)
    steps = listed(plan, columns)
    if faults := [*check_tokens(plan), *check_presence(plan, columns, steps)]:
        return Examined(faults)
    if faults := [*check_kv_offload(plan), *check_extensions(plan)]:
        return Examined(faults)
    graph = linked(plan, columns, steps)
    played = play(graph)
    # Without messages of their own, actions tell in which order their messages are sent.
    if faults := [*check_order(graph, played), *(check_links(columns, steps) if rows is None else ())]:
        return Examined(faults)
    launches = issue_order(plan, graph, played)
    if rows is not None:
        if faults := list(check_own_messages(launches.rows(), rows)):
            return Examined(faults)
        launches = Launches.of(rows)
    if faults := list(check_launches([launches])):
        return Examined(faults)
    timeline = timeline_of(plan, graph, played)
    faults = [*check_memory(timeline), *check_messages(plan, launches)] or list(check_predicted(timeline))
    return Examined(faults, timeline, launches)
