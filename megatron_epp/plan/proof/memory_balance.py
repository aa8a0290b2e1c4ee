"""The part of `check` for memory: nothing freed twice, early or never, and no rank above its cap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.kv_offload import host_memory
from megatron_epp.plan.operations import Role, Track, of_stages, operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulation import Timeline, memory_changes
from megatron_epp.plan.violation import Violation, fault


def check_memory(timeline: Timeline) -> Iterator[Violation]:
    """Replay every allocation and release in the order of the simulated times, and yield violations.

    Bytes are followed per stage and per chain of slices: the slices of a sequence share its keys and values, so one slice may
    free what another allocated; all other chunks are independent.
    """
    plan, chains = timeline.plan, _chains(timeline.plan)
    yield from _copies(plan)
    for rank in range(plan.num_ranks):
        yield from _above_cap(timeline, rank)
        if not _is_balanced(timeline, rank, chains):  # every plan is checked, and step by step takes a tenth of planning's time
            yield from _balance(timeline, rank, chains)
        yield from _above_host_cap(timeline, rank)


def _above_cap(timeline: Timeline, rank: int) -> Iterator[Violation]:
    cap, live = timeline.plan.cap_bytes[rank], timeline.plan.static_bytes[rank]
    if live > cap:
        yield fault(f"static bytes {live} are above the cap of {cap}", rank)
    elif timeline.peak_bytes[rank] > cap:
        for event in timeline.memory_events(rank):
            live += event.delta_bytes
            if live > cap:
                reason = (
                    f"{live} bytes live at {event.time_us:.1f} us, {live - cap} above the cap of {cap} "
                    f"(the rank's peak is {timeline.peak_bytes[rank]})"
                )
                action = event.step.action
                yield Violation(rank, event.position, action, reason, operation(action.op).track is Track.COPY)
                return


def _above_host_cap(timeline: Timeline, rank: int) -> Iterator[Violation]:
    caps = timeline.plan.host_cap_bytes
    for time_us, size in host_memory(timeline, rank) if caps else ():
        if size > caps[rank]:
            reason = f"{size} bytes in host memory at {time_us:.1f} us, {size - caps[rank]} above the cap of {caps[rank]}"
            yield fault(reason, rank)
            return


_Owner = tuple[str, int, int]
"""Owner of bytes: ``stage`` or ``site``, its index, and the first chunk of a chain of slices."""


def _is_balanced(timeline: Timeline, rank: int, chains: list[int]) -> bool:
    """True only if `_balance` finds nothing: one test of all steps, which a rank with steps of several actions fails."""
    graph, ops = timeline.graph, timeline.graph.columns.ops
    columns, (number, at_end, delta) = graph.columns, memory_changes(graph, timeline.played, rank)
    if len(columns.op) > len(columns.steps):
        return False
    op, site, chunk = columns.op[number], columns.site[number], columns.chunk[number]
    is_site = np.array([operation(kind).sites is not of_stages for kind in ops], dtype=np.int64)
    owner = (is_site[op] * (1 + site.max(initial=0)) + site) * len(chains) + np.array(chains)[chunk]
    order = np.argsort(owner, kind="stable")
    total = np.cumsum(delta[order])
    lasts = np.flatnonzero(np.append(np.diff(owner[order]) != 0, np.ones(min(1, len(order)), dtype=bool)))
    # Owners that end with nothing add nothing to the next one's sum.
    if (total[lasts] != 0).any() or (total < 0).any():
        return False
    reads = np.array([operation(kind).role in (Role.CLOSES, Role.DEFERRED) for kind in ops], dtype=bool)[op[order]]
    return not (reads & ~at_end[order] & (total - delta[order] <= 0)).any()


def _balance(timeline: Timeline, rank: int, chains: list[int]) -> Iterator[Violation]:
    live: dict[_Owner, int] = {}
    openers: dict[tuple[int, int], Action] = {}
    joined = _joined(timeline.plan, rank, chains)
    for event in timeline.memory_events(rank):
        step, delta, at_end = event.step, event.delta_bytes, event.at_end
        op, stage, chunk = step.action
        owner: _Owner = (site_name(op), stage, chains[chunk])
        owner = joined.get(owner, owner) if joined else owner
        before = live.get(owner, 0)
        live[owner] = after = before + delta
        for action in step.actions:
            role = operation(action.op).role
            defers = role is Role.DEFERRED and timeline.plan.num_layers[action.stage] > 0  # a stage without layers does not
            if role is Role.OPENS:
                if at_end and step.alloc_bytes > step.free_bytes:
                    openers[action[1:]] = action
            elif (defers or role is Role.CLOSES) and before <= 0 and not at_end and (opener := openers.get(action[1:])):
                yield Violation(rank, event.position, action, f"reads what {opener} kept, but all of it was freed before")
        if after < 0 and delta < 0:
            reason = f"frees {-delta} bytes when only {before} of its stage and chunk are live"
            yield Violation(rank, event.position, step.action, reason, operation(op).track is Track.COPY)
            live[owner] = 0
    for (site, index, chain), left in live.items():
        if left > 0:
            reason = f"{left} bytes of {site} {index}, chunk {chain} (and later slices of its sequence) are never freed"
            yield fault(reason, rank)


def site_name(op: Op) -> str:
    return "stage" if operation(op).sites is of_stages else "site"


def _joined(plan: Plan, rank: int, chains: list[int]) -> dict[_Owner, _Owner]:
    """Owners that are one because actions of both run in one step, each with the one that stands for it; none without such."""
    joined: dict[_Owner, _Owner] = {}

    def root(owner: _Owner) -> _Owner:
        while (above := joined.get(owner, owner)) != owner:
            owner = above
        return owner

    for step in plan.ranks[rank]:
        if step.also:
            first, *others = (root((site_name(op), stage, chains[chunk])) for op, stage, chunk in step.actions)
            joined |= {other: first for other in others if other != first}
    return {owner: root(owner) for owner in joined}


def _copies(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless a load allocates as many bytes as its offload frees, and neither changes memory otherwise."""
    for rank, steps in enumerate(plan.copies):
        moved = {step.action: step.free_bytes for step in steps if step.action.op is Op.O}
        for position, step in enumerate(steps):
            reason, is_load = "", step.action.op is Op.L
            if is_load and step.alloc_bytes != (away := moved[step.action._replace(op=Op.O)]):
                reason = f"loads {step.alloc_bytes} bytes; its offload moved {away}"
            elif besides := step.free_bytes if is_load else step.alloc_bytes:
                reason = f"a load frees {besides} bytes" if is_load else f"an offload allocates {besides} bytes"
            if reason:
                yield Violation(rank, position, step.action, reason, in_copies=True)


def _chains(plan: Plan) -> list[int]:
    """Return, for every chunk, the least number of those that it shares keys and values with; its own if there are none."""
    stands = list(range(len(plan.chunks)))

    def root(chunk: int) -> int:
        while stands[chunk] != chunk:
            chunk = stands[chunk]
        return chunk

    for chunk, before in enumerate(slice_neighbours(plan.chunks, plan.borrowed).previous):
        for other in before:
            low, high = sorted((root(chunk), root(other)))
            stands[high] = low
    return [root(chunk) for chunk in stands]
