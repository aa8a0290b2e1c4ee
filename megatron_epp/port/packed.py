"""Plans as messages between the processes of one training (`pack_plan`), with the lowered actions of every rank.

They are pickled: a rank reads its part in a tenth of the time that a plan file takes, and lowers nothing, which would keep the
interpreter from launching kernels. A message is for the same version of this program, and from a process of the same training.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from megatron_epp.plan import Action, Chunk, Plan, PlanError, Segment


class PackedPlan(NamedTuple):
    """A replica's plan for a global batch."""

    message: bytes
    plan_digest: str
    rows: tuple[bytes, ...]  # the lowered actions of every rank
    planning_us: float  # how long it took to make, and the division before it
    share: tuple[int, ...]  # positions of its sequences in the global batch, in the plan's order
    division: int = 0  # a checksum, the same for all replicas' plans of a batch
    # Bytes by item of the fullest rank at its peak, of the first plan that a training runs; else None
    peak_items: dict[str, int] | None = None

    def plan(self) -> Plan:
        plan: Plan = _unpacked(self.message)
        return plan

    def actions(self, rank: int) -> tuple[Action, ...]:
        actions: tuple[Action, ...] = _unpacked(self.rows[rank])
        return actions


PackedPlans = tuple[PackedPlan, ...]
"""Plans of the replicas of a group, in their order."""


def _unpacked(message: bytes) -> Any:
    try:
        return pickle.loads(zlib.decompress(message))
    except zlib.error as error:  # its checksum covers the whole message
        raise PlanError(f"the message of {len(message)} bytes is no packed plan: {error}") from None


MicrobatchLengths = tuple[tuple[int, ...], ...]
"""Tokens of every sequence of every microbatch, in the caller's order."""


class OrderedPlan(NamedTuple):
    """A plan of whole microbatches, a chunk for each, and the microbatch of every chunk."""

    plan: Plan
    order: tuple[int, ...]

    def of(self, microbatches: MicrobatchLengths) -> OrderedPlan:
        """Return the same order, recompute and offload for other microbatches, none of which has more tokens or pairs.

        The plan's times are those of the microbatches that it was made for: a replica that shares experts waits for others'.
        """
        chunks, flat = chunks_of(microbatches), tuple(length for lengths in microbatches for length in lengths)
        return self._replace(plan=replace(self.plan, lengths=flat, chunks=tuple(chunks[index] for index in self.order)))


def chunks_of(microbatches: Sequence[tuple[int, ...]]) -> tuple[Chunk, ...]:
    """Return a chunk per microbatch, in the caller's order."""
    segments = [Segment(number, 0, length) for number, length in enumerate(n for lengths in microbatches for n in lengths)]
    return tuple(Chunk(tuple(segments[start:end])) for start, end in pairwise(accumulate(map(len, microbatches), initial=0)))
