"""Limits of memory: the longest sequence, the largest batch and the smallest cap for which there is a plan.

Found by bisection with the planner itself. Which sizes fit is a little ragged at the edge, for planners search tables of chunks
and not all of them; what is named fits, and one step more does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from megatron_epp.cost import Costs
from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Plan, is_unlimited
from megatron_epp.planner import plan
from megatron_epp.planner.problem import Options, Problem

LONGEST = 1 << 25
"""Longest sequence, in tokens, that is tried."""
BATCHES = 16
"""Largest multiple of the batch that is tried."""
_GRAINS = 32
"""Number of steps between a power of two and the next."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Largest, or smallest, number that fits.

    Attributes:
        value: the number; None where nothing fits.
        step: distance to a number that does not fit; 0 where none was tried.
    """

    value: int | None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Reach:
    """All limits of a batch.

    Attributes:
        alone: tokens of the longest sequence, with nothing else in the batch; None without a cap.
        with_rest: the same, with all of the batch but its longest sequence; None without a cap.
        batch: sequences of lengths as in the batch; None without a cap.
        cap: bytes of a rank with which the batch fits.
        cap_plan: that plan.
    """

    alone: Limit | None
    with_rest: Limit | None
    batch: Limit | None
    cap: Limit
    cap_plan: Plan


@dataclass(frozen=True, slots=True)
class Limits:
    """Search for the limits of batches like a given one.

    Args:
        problem: the batch, the pipeline and its caps.
        costs_for: costs for a number of tokens of the longest sequence.
        options: the settings of the user.
        tried: called before each plan with the limit that it serves.
    """

    problem: Problem
    costs_for: Callable[[int], Costs]
    options: Options
    tried: Callable[[str], None] = lambda _: None

    def reach(self) -> Reach:
        """Compute every limit; several dozen plans. Raises `InfeasibleError` where no cap is high enough."""
        rest = sorted(self.problem.lengths)[:-1]
        is_capped = not is_unlimited(max(self.problem.cap_bytes))
        cap, cap_plan = self.cap()
        alone = self.context() if is_capped else None
        return Reach(
            alone, self.context(rest) if is_capped and rest else alone, self.batch() if is_capped else None, cap, cap_plan
        )

    def context(self, others: Sequence[int] = ()) -> Limit:
        """Find the longest sequence, in tokens, that fits together with others."""
        return _largest(lambda tokens: self._fits((tokens, *others), "longest sequence"), self.problem.token_multiple, LONGEST)

    def batch(self) -> Limit:
        """Find the most sequences that fit, of lengths as in the batch, taken in turn."""
        lengths = self.problem.lengths
        most = BATCHES * len(lengths)

        @cache
        def fits(count: int) -> bool:
            rounds, rest = divmod(count, len(lengths))
            return self._fits(lengths * rounds + lengths[:rest], "largest batch")

        return Limit(most) if fits(most) else _largest(fits, 1, most)

    def cap(self, step: int | None = None) -> tuple[Limit, Plan]:
        """Find the smallest cap, equal on all ranks, with which the batch fits, and its plan.

        Args:
            step: bytes between the caps tried; None for about a thousandth of the answer.

        Raises:
            InfeasibleError: no cap is high enough: memory is not the obstacle.
        """
        made = self._plan(self.problem.lengths, "smallest cap", UNLIMITED_BYTES)
        peak = max(made.predicted.peak_bytes)
        step = step or 1 << max(0, peak.bit_length() - 11)
        low, high = max(made.static_bytes) // step, -(-peak // step)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fits(self.problem.lengths, "smallest cap", middle * step)
            low, high = (low, middle) if fits else (middle, high)
        with suppress(InfeasibleError):
            made = self._plan(self.problem.lengths, "smallest cap", high * step)
        return Limit(high * step, step), made

    def _fits(self, lengths: tuple[int, ...], question: str, cap_bytes: int | None = None) -> bool:
        """Return True if there is a plan. A batch that fits without offload fits with it, and that is faster to know."""
        for offload in (False, True) if self.options.offload else (False,):
            with suppress(InfeasibleError):
                self._plan(lengths, question, cap_bytes, replace(self.options, offload=offload))
                return True
        return False

    def _plan(
        self, lengths: tuple[int, ...], question: str, cap_bytes: int | None = None, options: Options | None = None
    ) -> Plan:
        self.tried(question)
        problem = replace(self.problem, lengths=lengths)
        if cap_bytes is not None:
            problem = replace(problem, cap_bytes=(cap_bytes,) * problem.num_ranks)
        return plan(problem, self.costs_for(max(lengths)), options or self.options)


def _largest(fits: Callable[[int], bool], multiple: int, most: int) -> Limit:
    """Find the largest multiple up to `most` that fits, to within a relatively small step: by doubling, then halving."""
    low, high, most = 0, multiple, most // multiple * multiple
    while fits(high):
        if high >= most:
            return Limit(high)
        low, high = high, min(2 * high, most)
    if not low:
        return Limit(None, multiple)
    step = max(multiple, low // _GRAINS // multiple * multiple)
    while high - low > step:
        middle = low + max(step, (high - low) // 2 // step * step)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Limit(low, high - low)
