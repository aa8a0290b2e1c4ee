"""What the live bytes of a plan are made of, item by item, at every moment of its simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.plan import AnyStep
from megatron_epp.plan.simulate import Timeline

Items = Mapping[str, int]
"""Bytes by what they are for."""


class Moment(NamedTuple):
    """What a rank holds from a time on.

    Attributes:
        time_us: when it begins.
        items: bytes by what they are for, those held throughout included; none is zero.
        step: what begins or ends then; None at the start.
    """

    time_us: float
    items: dict[str, int]
    step: AnyStep | None

    @property
    def num_bytes(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes of a simulated plan by what they are for.

    Attributes:
        timeline: of the plan.
        static: held throughout, by rank.
        takes, gives: what every step takes when it starts and gives back when it ends. Their sums are the step's
            `alloc_bytes` and `free_bytes`; an item that a step turns into another may be below zero.
        order: names of what comes and goes, as reports list them. The last is what an allocator loses.
        loss_share: that, as a share of all else that comes and goes; it is in every other item until it is told apart here.
    """

    timeline: Timeline
    static: tuple[Items, ...]
    takes: Mapping[Action, Items]
    gives: Mapping[Action, Items]
    order: tuple[str, ...]
    loss_share: float = 0.0

    @property
    def items(self) -> list[str]:
        """Names of all items that any rank ever has, as reports list them."""
        there = {name for rank in range(len(self.static)) for moment in self.moments(rank) for name in moment.items}
        return [name for name in (*self.static[0], *self.order) if name in there]

    def moments(self, rank: int) -> list[Moment]:
        """What a rank holds, from the start on, whenever that changes; the sums are those of `Timeline.live_bytes`."""
        live: Counter[str] = Counter()
        found = [Moment(0.0, self._shown(rank, live), None)]
        for event in self.timeline.memory_events[rank]:
            if event.at_end:
                live.subtract(self.gives[event.step.action])
            else:
                live.update(self.takes[event.step.action])
            if event.delta_bytes:
                found.append(Moment(event.time_us, self._shown(rank, live), event.step))
        return found

    def peak(self, rank: int) -> Moment:
        """When a rank first holds most."""
        return max(self.moments(rank), key=lambda moment: moment.num_bytes)

    def alive(self, rank: int, until: Moment) -> list[tuple[int, int]]:
        """Stage and chunk of what has run forward at a moment of `moments`, and has not ended its backward, in order."""
        alive: dict[tuple[int, int], None] = {}
        for event in self.timeline.memory_events[rank]:
            op, *key = event.step.action
            if op is Op.F and not event.at_end:
                alive[key[0], key[1]] = None
            if event.step is until.step:
                break
            if op is Op.B and event.at_end:
                alive.pop((key[0], key[1]), None)
        return list(alive)

    def _shown(self, rank: int, live: Counter[str]) -> dict[str, int]:
        *names, lost = self.order
        own = {name: round(live[name] / (1 + self.loss_share)) for name in names}
        own[lost] = live.total() - sum(own.values())
        return {name: size for name, size in (*self.static[rank].items(), *own.items()) if size}
