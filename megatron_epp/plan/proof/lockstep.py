"""Verification that plans of replicas that share experts can run in lockstep.

Every forward, backward and recompute of a layer with experts exchanges tokens with the other replicas. So at every step all of
them must be in the same kind of action on the same stage, and recompute the same layers in it. Weight gradients, copies and KV
offload exchange nothing and may differ; but they change when messages are received among the exchanges, so that replicas may
wait for each other: `deadlock` checks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron_epp.plan.action import Action
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.operations import operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.proof.deadlock import check_launches
from megatron_epp.plan.violation import Violation, fault


def check_lockstep(plans: Sequence[Plan]) -> list[Violation]:
    """Find every violation of lockstep between the first replica's plan and another, in which `rank` and `position` are."""
    faults = [each for replica, plan in enumerate(plans) if replica for each in _against(plans[0], plan, replica)]
    if faults or not plans:
        return faults
    return list(check_launches([lower(plan) for plan in plans], lockstep=True))


def _against(first: Plan, plan: Plan, replica: int) -> Iterator[Violation]:
    for name in ("num_layers", "placement", "forward_only"):
        expected, own = getattr(first, name), getattr(plan, name)
        if own != expected:
            yield fault(f"replica {replica} has {name} {own}, replica 0 has {expected}")
    if len(plan.chunks) != len(first.chunks):
        yield fault(f"replica {replica} has {len(plan.chunks)} chunks, replica 0 has {len(first.chunks)}")
    for stage, rows in enumerate(zip(first.recompute, plan.recompute, strict=False)):
        for c, (expected, own) in enumerate(zip(*rows, strict=False)):
            if own != expected:
                reason = f"stage {stage} recomputes {own} layers of chunk {c} on replica {replica}, {expected} on replica 0"
                yield fault(reason, plan.placement[stage])
    for rank in range(max(plan.num_ranks, first.num_ranks)):
        yield from _order(_exchanging(first, rank), _exchanging(plan, rank), rank, replica)


def _order(
    first: Sequence[tuple[int, Action]], running: Sequence[tuple[int, Action]], rank: int, replica: int
) -> Iterator[Violation]:
    for number, (expected, own) in enumerate(zip_longest(first, running)):
        if expected is None:
            yield Violation(rank, own[0], own[1], f"replica {replica} runs it as exchange {number}; replica 0 has no more")
        elif own is None:
            yield fault(f"replica {replica} has no exchange {number}, where replica 0 runs {expected[1]}", rank)
        elif expected[1] != own[1]:
            yield Violation(rank, own[0], own[1], f"replica {replica} runs it where replica 0 runs {expected[1]}")


def _exchanging(plan: Plan, rank: int) -> list[tuple[int, Action]]:
    """Positions and actions of a rank that run layers, and so exchange tokens."""
    if rank >= plan.num_ranks:
        return []
    return [(position, action) for position, action in enumerate(plan.actions(rank)) if operation(action.op).in_layers]
