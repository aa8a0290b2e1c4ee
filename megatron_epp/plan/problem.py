"""Input of a planner: the batch and the machine (`Problem`), and the settings of the user (`Options`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.plan import UNLIMITED_BYTES
from megatron_epp.plan.recompute import FULL_ONLY

TrainedParts = tuple[int, ...]
"""Numbers of trained tokens in equal parts of a sequence, in order; the length of a part is rounded."""


class TokenSpan(NamedTuple):
    """Tokens ``[start, end)`` of a sequence that no cut may part, such as a picture's."""

    start: int
    end: int
    # What the first stage does for them besides its layers, as the number of tokens that takes as long in one layer
    work: float = 0.0
    kept: float = 0.0  # what that keeps from forward to backward, as the number of tokens of which one layer keeps as much


Spans = tuple[TokenSpan, ...]
"""Spans of a sequence, ascending; they do not overlap."""

OF_SEQUENCES = ("lengths", "trained", "loss_groups", "microbatches", "spans", "borrowed")
"""Fields of a problem with an entry for every sequence of the batch."""


class Lengths(NamedTuple):
    """Sequences of a batch as planning knows them, by the names of `Problem`."""

    lengths: tuple[int, ...]
    trained: tuple[TrainedParts, ...] = ()
    loss_groups: tuple[int, ...] = ()
    spans: tuple[Spans, ...] = ()
    borrowed: tuple[Borrowed, ...] = ()


Share = tuple[int, ...]
"""Positions in a global batch, ascending."""
LockstepGroups = tuple[tuple[int, ...], ...]
"""Replicas whose plans are made together, for they share experts; each replica is in one group."""


def by_count(count: int, replica: int, replicas: int) -> Share:
    """Return the share of a replica where sequences are dealt one after the other."""
    return tuple(range(replica, count, replicas))


def connected(sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Join sets of numbers that have one in common. Returns each ascending, by their first numbers."""
    joined: dict[int, set[int]] = {}
    for numbers in map(set, sets):
        together = numbers.union(*(joined.get(number, {number}) for number in numbers))
        joined |= dict.fromkeys(together, together)
    return tuple(sorted({tuple(sorted(together)) for together in joined.values()}))


def imbalance(makespans_us: Sequence[float]) -> float:
    """Relative excess of the slowest makespan over the mean: ``max / mean - 1``, the share of time that replicas wait."""
    mean_us = sum(makespans_us) / len(makespans_us)
    return max(makespans_us) / mean_us - 1 if mean_us else 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """One iteration of one pipeline, before anything is decided.

    Attributes:
        lengths: input tokens of every sequence of the batch, one less than it has in its file.
        placement: the rank that runs each stage.
        cap_bytes: most bytes that each rank may hold, static bytes included; `UNLIMITED_BYTES` where it does not matter.
        token_multiple: chunk token counts are padded to a multiple of this, and slices end on one.
        forward_only: plan an evaluation, without backward.
        host_cap_bytes: most bytes that each rank may have in host memory.
        message_bytes: bytes that each rank sets aside for messages in flight while the order is not known; empty for a guess.
        trained: trained tokens of every sequence, which alone pass the output layer; empty if all tokens are trained.
        loss_groups: a number for every sequence: the loss of sequences with equal ones is computed together, when all have run
            forward; empty if losses are of single tokens.
        microbatches: a number for every sequence: those with equal ones run whole, in a chunk of their own; empty to cut and
            pack the batch.
        spans: of every sequence, tokens that no slice may cut; empty if there are none.
        borrowed: of every sequence, the first tokens that another one holds; empty if none share any.
    """

    lengths: tuple[int, ...]
    placement: tuple[int, ...]
    cap_bytes: tuple[int, ...]
    token_multiple: int = 1
    forward_only: bool = False
    host_cap_bytes: int = UNLIMITED_BYTES
    message_bytes: tuple[int, ...] = ()
    trained: tuple[TrainedParts, ...] = ()
    loss_groups: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    spans: tuple[Spans, ...] = ()
    borrowed: tuple[Borrowed, ...] = ()

    def part(self, share: Iterable[int]) -> Problem:
        """Return the problem of the sequences at these positions, in this order."""
        at = tuple(share)
        own: dict[str, Any] = {name: tuple(values[q] for q in at) for name in OF_SEQUENCES if (values := getattr(self, name))}
        if self.borrowed:
            where = {q: number for number, q in enumerate(at)} | {-1: -1}
            own["borrowed"] = tuple(Borrowed(where[lender], tokens) for lender, tokens in own["borrowed"])
        return replace(self, **own)

    @property
    def indivisible(self) -> tuple[tuple[int, ...], ...]:
        """Sequences that no other replica may have a part of: one each, or all of a loss group or a tree."""
        groups: dict[int, list[int]] = {}
        for q, number in enumerate(self.loss_groups or range(len(self.lengths))):
            groups.setdefault(number, []).append(q)
        lent = ((q, lender) for q, (lender, tokens) in enumerate(self.borrowed) if tokens)
        return connected(chain(groups.values(), lent)) if self.borrowed else tuple(map(tuple, groups.values()))

    def first_token(self, sequence: int) -> int:
        """Return the first token that a sequence holds itself."""
        return self.borrowed[sequence].tokens if self.borrowed else 0

    @property
    def trained_share(self) -> float:
        return sum(map(sum, self.trained)) / sum(self.lengths) if self.trained else 1.0

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.cap_bytes)

    @property
    def has_one_stage_per_rank(self) -> bool:
        return self.placement == tuple(range(len(self.placement)))


@dataclass(frozen=True, slots=True)
class Options:
    """Settings that the user fixed; the planner decides the rest.

    Attributes:
        chunk_tokens: most padded tokens of a chunk; None for no limit.
        slices, chunks: slices of the longest sequence, or about so many chunks ("greedy" alone); None lets the planner search.
        context: tokens of a row of the planners that pad or pack to a fixed length; None for the longest sequence.
        recompute: "auto" recomputes as much as the memory caps ask for; a number recomputes that many layers of every stage.
        recompute_modes: "all" chooses among the modes of `Recompute` that the costs know, where `recompute` is "auto";
            "full" leaves it at whole layers.
        planner: a name in `PLANNERS`, or ``module:function``.
        split_weight: run weight gradients as actions of their own (W) where the costs time them separately.
        offload: copy activations to the host and back where the costs have a link, and keep keys and values of slices there (KV
            offload).
        kv_offload: with `offload`, use KV offload for slices where memory is short.
        steps: changes that the local search behind the planner tries; None for as many as pay (`features.local_search`).
        plan_limit_s: seconds for which the planner "milp" looks for a better plan; None for its default.
        seed: of the planner's random choices; recorded in the plan.
        overlap_exchanges: with the planner "greedy", join backwards and forwards into steps of two where that is faster: each
            computes while the other exchanges activations between tensor-parallel ranks.
        shares: tokens that sequences begin with in common run once, also where a plan without that is faster.
    """

    chunk_tokens: int | None = None
    slices: int | None = None
    chunks: float | None = None
    context: int | None = None
    recompute: Literal["auto"] | int = "auto"
    recompute_modes: Literal["all", "full"] = "all"
    planner: str = "greedy"
    split_weight: bool = False
    offload: bool = False
    kv_offload: bool = True
    steps: int | None = None
    plan_limit_s: float | None = None
    seed: int = 0
    overlap_exchanges: bool = False
    shares: bool = False

    def modes(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of `Recompute` that a plan may use, of those that the costs know."""
        return known if self.recompute == "auto" and self.recompute_modes == "all" else FULL_ONLY
