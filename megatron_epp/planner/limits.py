"""Limits of memory: the longest sequence, the largest batch and the smallest cap for which there is a plan.

Sizes are tried with the planner itself, or, where the result is the same, with one order of every chunk table (`least`). Larger
sizes than the limit may fit again here and there, since planners search only some chunk tables; the size one step above the
limit does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from megatron_epp.cost import Costs
from megatron_epp.plan import InfeasibleError, Plan, is_unlimited
from megatron_epp.planner import plan
from megatron_epp.planner.least import has_plan, is_told_by_one_order, least_decisions
from megatron_epp.planner.problem import Options, Problem, static_bytes

LONGEST = 1 << 25
"""Longest sequence, in tokens, that is tried: 33 million, beyond the context of any model."""
BATCHES = 16
"""Largest multiple of the batch that is tried. Not measured: planning takes longer, the larger the batch."""
LARGE = 640
"""Stages times chunks of a plan above which the smallest cap is the one that the planner names: such a plan takes about 2 s,
and to look for a smaller cap takes several.
"""
CAP_BITS = 11
"""Significant bits of the smallest cap with offload: it is found to about a thousandth."""
TRIES = {"alone": 12, "with_rest": 12, "batch": 8, "cap": 3}
"""Sizes that are tried for each limit, as a rule, from which the time that is left is foretold. With offload about twice as
many.
"""
_GRAINS = 32
"""Number of steps between a power of two and the next."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Largest, or smallest, number that fits.

    Attributes:
        value: the number; None where nothing fits.
        step: distance to a number that does not fit; 0 where none was tried. Both None and 0: it was not found in time.
    """

    value: int | None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Reach:
    """All limits of a batch, as far as they are known.

    Attributes:
        alone: tokens of the longest sequence, with nothing else in the batch; None without a cap.
        with_rest: the same, with all of the batch but its longest sequence; None without a cap.
        batch: sequences of lengths as in the batch; None without a cap.
        cap: bytes of a rank with which the batch fits.
        cap_plan: that plan; None where it was not made in time.
    """

    alone: Limit | None
    with_rest: Limit | None
    batch: Limit | None
    cap: Limit
    cap_plan: Plan | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Search for the limits of batches like a given one. All ranks have the cap of the rank with the least.

    Args:
        costs_for: costs for a number of tokens of the longest sequence.
        on_better: called with each answer that is better than the one before, until the last one is returned.
        tried: called after each size that was tried.
    """

    problem: Problem
    costs_for: Callable[[int], Costs]
    options: Options
    on_better: Callable[[Limit], None] = lambda _: None
    tried: Callable[[], None] = lambda: None

    def tries(self, name: str) -> int:
        """Return how many sizes are tried for a limit, as a rule."""
        return TRIES[name] * (2 if self.options.offload else 1)

    def questions(self) -> dict[str, Callable[[], tuple[Limit, Plan | None]]]:
        """Return functions that find the limits of a `Reach` by name, each with its plan if it has one.

        Without caps it is one; for a single sequence there is no rest to ask about.
        """
        if is_unlimited(max(self.problem.cap_bytes)):
            return {"cap": self.cap}
        rest = sorted(self.problem.lengths)[:-1]
        with_rest = {"with_rest": lambda: (self.context(rest), None)} if rest else {}
        return {"alone": lambda: (self.context(), None), **with_rest, "batch": lambda: (self.batch(), None), "cap": self.cap}

    def context(self, others: Sequence[int] = ()) -> Limit:
        """Find the longest sequence, in tokens, that fits together with others, given in tokens."""
        guess, multiple = self._guessed_tokens(max(self.problem.lengths), others), self.problem.token_multiple
        return _largest(lambda n: self._fits((n, *others)), multiple, LONGEST, guess, self.on_better)

    def batch(self) -> Limit:
        """Find the most sequences that fit, of lengths as in the batch, taken in turn."""
        lengths = self.problem.lengths
        most = BATCHES * len(lengths)

        def taken(count: int) -> tuple[int, ...]:
            rounds, rest = divmod(count, len(lengths))
            return lengths * rounds + lengths[:rest]

        @cache
        def fits(count: int) -> bool:
            return self._fits(taken(count))

        return Limit(most) if fits(most) else _largest(fits, 1, most, len(lengths), self.on_better)

    def cap(self) -> tuple[Limit, Plan]:
        """Find the smallest cap, equal on all ranks, with which the batch fits, and its plan.

        Planners name it themselves, but for offload, with which a smaller one may do: that is found by bisection. A plan's
        messages may need less than was set aside for them; that lowers it further, down to the last byte, unless plans are
        large: then it is less than a thousandth.

        Raises:
            InfeasibleError: no cap is high enough: memory is not the obstacle.
        """
        lengths = self.problem.lengths
        named = self._named_cap(lengths)
        self.on_better(Limit(named, named if self.options.offload else 0))
        if not self.options.offload:
            proof = self._plan(lengths, named)
            if proof.num_stages * len(proof.chunks) > LARGE:
                return Limit(named), proof
            with suppress(InfeasibleError):
                while (peak := max(proof.predicted.peak_bytes)) < named:  # room for messages that this plan does not need
                    proof, named = self._plan(lengths, peak), peak
            return Limit(named, 1), proof
        step = 1 << max(0, named.bit_length() - CAP_BITS)
        low, high = max(static_bytes(self.problem, self.costs_for(max(lengths)))) // step, -(-named // step)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._has_plan(lengths, offload=True, cap_bytes=middle * step)  # without offload none fits below `named`
            low, high = (low, middle) if fits else (middle, high)
            self.on_better(Limit(high * step, (high - low) * step))
        return Limit(high * step, step), self._plan(lengths, high * step)

    def _named_cap(self, lengths: tuple[int, ...]) -> int:
        """Return the smallest cap that the planner names for a batch, without offload.

        Raises `InfeasibleError` if it names none.
        """
        problem, options = self._problem(lengths, 1), replace(self.options, offload=False)
        try:
            (least_decisions if is_told_by_one_order(problem, options) else plan)(
                problem, self.costs_for(max(lengths)), options
            )
        except InfeasibleError as error:
            if not error.least_cap_bytes:
                raise
            return error.least_cap_bytes
        return 1

    def _guessed_tokens(self, longest: int, others: Sequence[int]) -> int:
        """Guess the longest sequence that fits: what a sequence needs grows about as its length does."""
        cap = min(self.problem.cap_bytes)
        try:
            named = self._named_cap((longest, *others))
        except InfeasibleError:
            return longest
        static = max(static_bytes(self.problem, self.costs_for(longest)))
        return round(longest * (cap - static) / max(1, named - static))

    def _fits(self, lengths: tuple[int, ...]) -> bool:
        """Return True if there is a plan. A batch that fits without offload fits with it, and that is faster to know."""
        choices = (False, True) if self.options.offload else (False,)
        return any(self._has_plan(lengths, offload) for offload in choices)

    def _has_plan(self, lengths: tuple[int, ...], offload: bool, cap_bytes: int | None = None) -> bool:
        """Return True if there is a plan with or without offload.

        Args:
            offload: whether activations may be offloaded.
            cap_bytes: of every rank; None for the problem's caps.
        """
        is_planned = self._is_planned(lengths, offload, cap_bytes)
        self.tried()
        return is_planned

    def _is_planned(self, lengths: tuple[int, ...], offload: bool, cap_bytes: int | None) -> bool:
        problem, options = self._problem(lengths, cap_bytes), replace(self.options, offload=offload, steps=0)
        if is_told_by_one_order(problem, options):
            return has_plan(problem, self.costs_for(max(lengths)), options)
        with suppress(InfeasibleError):
            plan(problem, self.costs_for(max(lengths)), options)
            return True
        return False

    def _problem(self, lengths: tuple[int, ...], cap_bytes: int | None) -> Problem:
        """Return the problem of other lengths, and of other caps if given."""
        problem = replace(self.problem, lengths=lengths)
        return problem if cap_bytes is None else replace(problem, cap_bytes=(cap_bytes,) * problem.num_ranks)

    def _plan(self, lengths: tuple[int, ...], cap_bytes: int) -> Plan:
        result = plan(self._problem(lengths, cap_bytes), self.costs_for(max(lengths)), self.options)
        self.tried()
        return result


def _largest(fits: Callable[[int], bool], multiple: int, most: int, guess: int, tell: Callable[[Limit], None]) -> Limit:
    """Find the largest multiple up to `most` that fits, to within a relatively small step.

    From a guess on, strides double until one number fits and one does not; then the distance between them is halved.

    Args:
        tell: called with what is known whenever a larger number fits.
    """
    most = most // multiple * multiple
    unit = multiple << max(0, (guess // _GRAINS // multiple).bit_length() - 1)
    at, stride = min(max(guess // unit * unit, multiple), most), unit
    if fits(at):
        low, high = at, min(at + stride, most)
        tell(Limit(low))
        while low < most and fits(high):
            stride *= 2
            low, high = high, min(high + stride, most)
            tell(Limit(low))
        if low == most:
            return Limit(most)
    else:
        low, high = max(at - stride, multiple), at
        while low == high or not fits(low):
            if low == multiple:
                return Limit(None, multiple)
            stride *= 2
            low, high = max(low - stride, multiple), low
    step = multiple << max(0, (low // _GRAINS // multiple).bit_length() - 1)
    while high - low > step:
        tell(Limit(low, high - low))
        middle = low + max(step, (high - low) // 2 // step * step)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Limit(low, high - low)
