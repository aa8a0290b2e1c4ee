"""Composition of a plan's live bytes, by item, at every moment of its simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from typing import NamedTuple

from megatron_epp.plan.action import Action
from megatron_epp.plan.operations import Role, operation
from megatron_epp.plan.plan import AnyStep
from megatron_epp.plan.simulation import Timeline

Items = Mapping[str, int]
"""Bytes by item."""


class MemorySample(NamedTuple):
    """Memory of a rank from a point in time on, by item, none zero; `step` begins or ends then, None at the start."""

    time_us: float
    items: dict[str, int]
    step: AnyStep | None

    @property
    def num_bytes(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The bytes of a simulated plan by item."""

    timeline: Timeline
    static: tuple[Items, ...]  # held throughout, by rank
    # takes, gives: bytes that every step allocates when it starts and frees when it ends. Their sums are the step's
    # `alloc_bytes` and `free_bytes`; an item that a step turns into another may be below zero.
    takes: Mapping[Action, Items]
    gives: Mapping[Action, Items]
    # Names of the items that are not static, as reports list them. The last one is the allocator's loss.
    order: tuple[str, ...]
    # That loss, as a share of all other items that are not static; `takes` and `gives` include it in every item, and it is
    # separated here
    loss_share: float = 0.0
    _peaks: dict[int, MemorySample] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def items(self) -> list[str]:
        """Names of all items that any rank ever has, as reports list them."""
        changes = chain(self.static, self.takes.values(), self.gives.values())
        there = {name for items in changes for name, size in items.items() if size}
        if self.loss_share and any(self.takes.values()):
            there.add(self.order[-1])
        return [name for name in (*self.static[0], *self.order) if name in there]

    def moments(self, rank: int) -> list[MemorySample]:
        """Return a rank's memory at the start and after every change; the sums equal `Timeline.live_bytes`."""
        return [MemorySample(time_us, self._shown(rank, live), step) for time_us, live, step in self._changes(rank)]

    def peak(self, rank: int) -> MemorySample:
        """Return the first moment at which a rank's memory is at its maximum."""
        if rank not in self._peaks:
            live = [0, *accumulate(event.delta_bytes for event in self.timeline.memory_events(rank) if event.delta_bytes)]
            time_us, items, step = next(islice(self._changes(rank), live.index(max(live)), None))
            self._peaks[rank] = MemorySample(time_us, self._shown(rank, items), step)
        return self._peaks[rank]

    def _changes(self, rank: int) -> Iterator[tuple[float, Counter[str], AnyStep | None]]:
        """Yield the start and every change: its time, the bytes by item that are not static, and its step."""
        live: Counter[str] = Counter()
        yield 0.0, live, None
        for event in self.timeline.memory_events(rank):
            if event.at_end:
                live.subtract(self.gives[event.step.action])
            else:
                live.update(self.takes[event.step.action])
            if event.delta_bytes:
                yield event.time_us, live, event.step

    def alive(self, rank: int, until: MemorySample) -> list[tuple[int, int]]:
        """Return stage and chunk of passes whose forward has started by a moment and whose backward has not ended."""
        alive: dict[tuple[int, int], None] = {}
        for event in self.timeline.memory_events(rank):
            passes = [(operation(op).role, (stage, chunk)) for op, stage, chunk in event.step.actions]
            if not event.at_end:
                alive |= {key: None for role, key in passes if role is Role.OPENS}
            if event.step is until.step:
                break
            for role, key in passes:
                if role is Role.CLOSES and event.at_end:
                    alive.pop(key, None)
        return list(alive)

    def _shown(self, rank: int, live: Counter[str]) -> dict[str, int]:
        *names, lost = self.order
        own = {name: round(live[name] / (1 + self.loss_share)) for name in names}
        own[lost] = live.total() - sum(own.values())
        return {name: size for name, size in (*self.static[rank].items(), *own.items()) if size}
