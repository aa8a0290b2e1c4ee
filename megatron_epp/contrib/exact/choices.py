"""Choices of the exact planner for each stage and chunk, and all times and sizes of a case in whole numbers.

A choice settles the recompute of a stage and chunk, whether its weight gradient is an action of its own, and the share of its
activations that is copied to host memory. Everything that depends on it is a row of numbers, so the solver needs no products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.planner.evaluate import moved_of
from megatron_epp.planner.tables import Tables

FINEST = 1 << 20
"""Ticks of a horizon where times have no common divisor."""
DIVISORS = range(1, 13)
"""Divisors of the shortest time that are tried as the tick in which all times are whole."""
ROUNDING = 1e-9
"""Relative tolerance for times that are whole numbers of ticks."""
SHARES = (1.0, 0.5, 0.25)
"""Shares of the bytes that may leave a device: what the solver can choose, besides the shares of its start."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Conversion of times to whole ticks."""

    tick_us: float  # length of a tick

    @staticmethod
    def of(times_us: Iterable[float], horizon_us: float) -> Clock:
        """Choose the longest tick in which all times are whole, or else a small part of the horizon."""
        own = sorted({time_us for time_us in times_us if time_us > 0.0})
        for divisor in DIVISORS if own else ():
            tick_us = own[0] / divisor
            if all(abs(time_us / tick_us - round(time_us / tick_us)) <= ROUNDING * time_us / tick_us for time_us in own):
                return Clock(tick_us)
        return Clock(horizon_us / FINEST)

    def ticks(self, time_us: float) -> int:
        """Whole ticks of a time, rounded down, so that sums are no longer than the time."""
        return math.floor(time_us / self.tick_us * (1 + ROUNDING))


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to run a stage and chunk."""

    num_steps: int  # recompute steps
    split: bool  # the weight gradient is an action of its own
    share: float  # of the kept bytes that is copied to host memory and back; zero for none
    backward_us: float  # time of the backward
    kept_bytes: int  # from the start of the forward to the end of the backward, copied ones included
    moved_bytes: int  # the part that is copied
    takes_bytes: int  # allocated by the backward above what is live when it starts


def choices_of(
    tables: Tables, stage: int, c: int, *, splits: bool, shares: Sequence[float], recompute: Iterable[int]
) -> Iterator[Choice]:
    """Yield the choices of a stage and chunk.

    Args:
        splits: weight gradients may be actions of their own.
        shares: of the kept bytes that may be copied; zero is always a choice.
    """
    passes, ways = tables.passes[stage], tables.passes[stage].ways
    may_split = splits and bool(passes.weight_us[c] > 0.0 and passes.weight_bytes[c] > 0)
    for num_steps in recompute:
        kept_bytes = tables.kept_bytes(stage, c, num_steps)
        whole_us = float(passes.backward_us[c]) + float(ways.again_us[c, num_steps])
        for split in (False, True) if may_split else (False,):
            takes = int((ways.split if split else ways.whole)[c, num_steps]) - kept_bytes
            backward_us = whole_us - (float(passes.saved_by_split_us[c]) if split else 0.0)
            yield Choice(num_steps, split, 0.0, backward_us, kept_bytes, 0, takes)
            seen = {0}
            for share in shares:
                moved = moved_of(kept_bytes, tables.layer_input(stage, c), share)
                if moved not in seen and moved <= kept_bytes * tables.offloadable_share:
                    seen.add(moved)
                    yield Choice(num_steps, split, share, backward_us, kept_bytes, moved, takes)
