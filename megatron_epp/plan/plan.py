"""The plan: everything one pipeline does in one iteration, as plain data.

A plan holds no tensors, groups or callables. It prints, diffs, loads and replays; `check` verifies it, `simulate` times it,
`lower` adds its messages and the runtime interprets it. Times are microseconds, sizes are bytes, indices count from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Borrowed, Chunk
from megatron_epp.plan.operations import Collective, MessageKind
from megatron_epp.plan.recompute import Recompute

SCHEMA = "megatron-epp/plan"
VERSION, VERSION_WITH_BORROWED = 3, 4
"""Versions of plan files. Readers of version 3 ignore fields that they do not know, and would run shared prefixes wrongly."""
UNLIMITED_BYTES = 1 << 62
"""No memory cap."""

EXTENSIONS = {"context_groups": "megatron_epp.contrib.flexsp.context_groups:ContextGroups"}
"""Fields of plan files, each with the type of its values as ``module:type``, which is imported when a file has the field. Its
`from_json` reads the value, and raises `EppError`, or another error of the value's form."""

Floats = npt.NDArray[np.float64]


class Extension(Protocol):
    """Part of a plan. Two of the same content are equal."""

    field: ClassVar[str]  # its name in plan files

    def faults(self, chunks: Sequence[Chunk], lengths: Sequence[int]) -> Iterator[str]:
        """Yield what is wrong with it in a plan of sequences of these lengths in tokens."""
        ...

    def divided(self, chunk: int) -> Sequence[tuple[str, Sequence[int]]]:
        """Return the parts into which it divides a chunk, each with a name and the positions of its segments."""
        ...

    def to_json(self) -> Any:
        """Return plain data for a plan file; `from_json` of its type gives an equal object."""
        ...


def is_unlimited(cap_bytes: int) -> bool:
    return cap_bytes >= UNLIMITED_BYTES


class Step(NamedTuple):
    """An action with its planned time and memory.

    `alloc_bytes` become live when it starts, `free_bytes` are released when it ends; memory used only inside the action counts
    as allocated at its start and freed at its end. `time_us` includes recompute done inside the action.

    `also` are further actions that run in the same step (a braid, such as a forward with a backward of another chunk): all
    start when each of them can, and end together. Time and bytes are of all together.
    """

    action: Action
    time_us: float
    alloc_bytes: int
    free_bytes: int
    also: tuple[Action, ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        return (self.action, *self.also) if self.also else (self.action,)


class Copy(NamedTuple):
    """An offload or a load: a step of a rank's copies, issued as soon as the rank's compute action `after` has ended.

    `after` determines the time of loads: a copy starts when it is issued, the copies listed before it are done, and the link to
    the host is free in its direction (`simulate`). None: issued at the start. `time_us` is the time of a copy that does not
    share the link.
    """

    action: Action
    time_us: float
    alloc_bytes: int
    free_bytes: int
    after: Action | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        return (self.action,)


AnyStep = Step | Copy


class KVOffload(NamedTuple):
    """KV offload of a sliced sequence on a stage: keys and values are in host memory, and on the device only while in use.

    The host has `cache_bytes` from the start of the first slice's forward on, and `gradient_bytes` more from the start of the
    last slice's backward on, up to the end of the first slice's backward. The steps' bytes include the device memory of the
    streamed pieces, and their times include copies not overlapped with attention.
    """

    stage: int
    sequence: int
    cache_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Time of each message, ``[stage][chunk]``, for the ``num_stages - 1`` boundaries; zero if both sides share a rank.

    `num_bytes` is the device memory of a chunk's activation, or its gradient, between stages; empty if it is not counted.
    `collective_us` has a pair for every collective of the plan, its operation and its time by chunk; a collective without a
    pair takes no time. `message_us` has such a pair for every message of an added operation, by the operation that sends it;
    these take no time on one rank, and their buffers are in the bytes of the steps that make and need them.
    """

    activation_us: tuple[tuple[float, ...], ...]
    gradient_us: tuple[tuple[float, ...], ...]
    num_bytes: tuple[int, ...] = ()
    collective_us: tuple[tuple[Op, tuple[float, ...]], ...] = ()
    message_us: tuple[tuple[Op, tuple[float, ...]], ...] = ()

    def times_of(
        self, carries: MessageKind | Collective, sites: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64]
    ) -> Floats:
        """Times of transfers between ranks, in microseconds or zero; `sites` are the lower ones of their two."""
        if isinstance(carries, MessageKind) and carries.times is not None:
            return np.array(getattr(self, carries.times), dtype=np.float64)[sites, chunks]
        timed = self.message_us if isinstance(carries, MessageKind) else self.collective_us
        times_us = dict(timed).get(carries.send if isinstance(carries, MessageKind) else carries.op)
        return np.array(times_us)[chunks] if times_us else np.zeros(len(chunks))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Simulated figures of a plan, and a lower bound of its makespan. `peak_bytes` is per rank, static bytes included.

    `check` compares it with a simulation, except for the bound, which may be any value up to the makespan.
    """

    makespan_us: float
    lower_bound_us: float
    peak_bytes: tuple[int, ...]
    bubble_fraction: float

    @classmethod
    def none(cls, num_ranks: int) -> Prediction:
        """Prediction of a plan that was not simulated, such as one written by hand: all values are zero."""
        return cls(0.0, 0.0, (0,) * num_ranks, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration of one pipeline.

    Attributes:
        lengths: input tokens of every sequence, one less than it has in its file.
        chunks: the chunk table; every token of every sequence is in exactly one chunk.
        num_layers: transformer layers of each stage.
        placement: the rank that runs each stage.
        recompute: ``[stage][chunk]``, number of the stage's layers that recompute in backward, for each recompute mode.
        recompute_us: ``[stage][chunk]``, time of recompute, a part of the backward's time.
        offload_share: ``[stage][chunk]``, share of the activation bytes that is offloaded between forward and backward.
        copies: the offload and load steps of each rank, in order, one at a time and overlapped with compute.
        host_links: index of the link to the host that each rank uses, on which copies of one direction take turns; empty if no
            link is shared.
        static_bytes: bytes each rank holds throughout (weights, gradients, optimizer), `message_bytes` included.
        loss_groups: groups of chunks whose loss is computed together: on the last stage, the backward of each waits for the
            forwards of all; empty if every chunk has a loss of its own.
        borrowed: of every sequence, the first tokens that another one holds; empty if no sequences share any.
        message_bytes: the part of `static_bytes` that each rank reserves for messages in flight; empty if they are not counted.
        cap_bytes: memory cap of each rank; `UNLIMITED_BYTES` (2^62) for no cap.
        host_cap_bytes: host memory cap of each rank; empty if unspecified.
        extensions: parts that other packages define; at most one of each type.
        token_multiple: chunks are padded to a multiple of this many tokens; slices end on one, but for a sequence's last.
        forward_only: an evaluation plan; it has no backward.
        costs: name or path of the cost profile.
        planner: name of the planner.
        seed: of the planner's search.
        notes: lines for people.
    """

    lengths: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    num_layers: tuple[int, ...]
    placement: tuple[int, ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    recompute_us: tuple[tuple[float, ...], ...]
    offload_share: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[Step, ...], ...]
    messages: Messages
    static_bytes: tuple[int, ...]
    cap_bytes: tuple[int, ...]
    predicted: Prediction
    copies: tuple[tuple[Copy, ...], ...] = ()
    kv_offload: tuple[KVOffload, ...] = ()
    host_cap_bytes: tuple[int, ...] = ()
    host_links: tuple[int, ...] = ()
    message_bytes: tuple[int, ...] = ()
    loss_groups: tuple[tuple[int, ...], ...] = ()
    borrowed: tuple[Borrowed, ...] = ()
    extensions: tuple[Extension, ...] = ()
    token_multiple: int = 1
    forward_only: bool = False
    costs: str = "analytic"
    planner: str = "greedy"
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def tables(self) -> tuple[tuple[bool, tuple[tuple[AnyStep, ...], ...]], ...]:
        """Tables of steps, each with a flag: False for the compute steps of all ranks, True for their copies."""
        return (False, self.ranks), (True, self.copies)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that do not run, since another sequence has them."""
        return sum(tokens for _, tokens in self.borrowed)

    @property
    def num_tokens(self) -> int:
        """Tokens that run."""
        return sum(self.lengths) - self.num_shared_tokens

    def padded_tokens(self, chunk: int) -> int:
        """Tokens of a chunk after padding: the length of every message that carries it (before sequence parallelism)."""
        return self.chunks[chunk].padded_tokens(self.token_multiple)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, on in enumerate(self.placement) if on == rank]

    def kv_offload_on(self, stage: int) -> frozenset[int]:
        return frozenset(entry.sequence for entry in self.kv_offload if entry.stage == stage)

    def actions(self, rank: int) -> tuple[Action, ...]:
        return tuple(action for step in self.ranks[rank] for action in step.actions)
