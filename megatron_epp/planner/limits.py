"""Limits of memory: the longest sequence, and the smallest cap, for which there is a plan.

Sizes are tried with the planner itself, or, where the result is the same, with one order of every chunk table (`least`). Larger
sizes than the limit may fit again here and there, since planners search only some chunk tables; the size one step above the
limit does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner import plan
from megatron_epp.planner.least import one_order_decides, proof_of, proven
from megatron_epp.planner.problem import Options, Problem, static_bytes

LONGEST_TOKENS = 1 << 25
"""Longest sequence, in tokens, that is tried: 33 million, beyond the context of any model."""
LARGE_PLAN_ITEMS = 640
"""Stages times chunks of a plan above which no smaller cap with offload is looked for: such a plan takes about 2 s."""
CAP_BITS = 7
"""Significant bits of the smallest cap with offload: it is found to about a hundredth."""
_SIZES_PER_DOUBLING = 32
"""Number of steps between a power of two and the next."""


def longest_sequence(problem: Problem, costs: Costs, options: Options, others: Sequence[int] = ()) -> tuple[int | None, int]:
    """Find the longest sequence, in tokens, that fits together with others.

    Args:
        problem: its longest sequence is where the search begins.
        others: tokens of each.

    Returns:
        the number of tokens, None if none fits, and the distance to a number that does not fit.
    """
    multiple, longest = problem.token_multiple, max(problem.lengths)
    guess = longest
    with suppress(InfeasibleError):  # what a sequence needs grows about as its length does
        named, static = (
            _named_cap(replace(problem, lengths=(longest, *others)), costs, options),
            max(static_bytes(problem, costs)),
        )
        guess = round(longest * (min(problem.cap_bytes) - static) / max(1, named - static))

    def fits(size: int) -> bool:
        return _fits(replace(problem, lengths=(size, *others)), costs, options)

    return _largest(fits, multiple, LONGEST_TOKENS, guess)


def smallest_cap(problem: Problem, costs: Costs, options: Options) -> Plan:
    """Return the plan of the smallest cap, equal on all ranks, with which a batch fits.

    Planners name it themselves, to less than a hundredth. With offload a smaller one may do: that is found by bisection, unless
    plans are large.

    Raises:
        InfeasibleError: no cap is high enough: memory is not the obstacle.
    """
    named = _named_cap(problem, costs, options)
    least = plan(_with_cap(problem, named), costs, options)
    if not options.offload or least.num_stages * len(least.chunks) > LARGE_PLAN_ITEMS:
        return least
    step = 1 << max(0, named.bit_length() - CAP_BITS)
    low, high = max(static_bytes(problem, costs)) // step, -(-named // step)
    while high - low > 1:
        middle = (low + high) // 2  # without offload none fits below `named`
        low, high = (low, middle) if _is_planned(_with_cap(problem, middle * step), costs, options) else (middle, high)
    return plan(_with_cap(problem, high * step), costs, options)


def _with_cap(problem: Problem, cap_bytes: int) -> Problem:
    return replace(problem, cap_bytes=(cap_bytes,) * problem.num_ranks)


def _named_cap(problem: Problem, costs: Costs, options: Options) -> int:
    """Return the smallest cap that the planner names for a batch, without offload.

    Raises `InfeasibleError` if it names none.
    """
    problem, options = _with_cap(problem, 1), replace(options, offload=False)
    try:
        (proven if one_order_decides(problem, options) else plan)(problem, costs, options)
    except InfeasibleError as error:
        if not error.least_cap_bytes:
            raise
        return error.least_cap_bytes
    return 1


def _fits(problem: Problem, costs: Costs, options: Options) -> bool:
    """Return True if there is a plan. A batch that fits without offload fits with it, and that is faster to know."""
    choices = (False, True) if options.offload else (False,)
    return any(_is_planned(problem, costs, replace(options, offload=offload)) for offload in choices)


def _is_planned(problem: Problem, costs: Costs, options: Options) -> bool:
    options = replace(options, steps=0)
    if one_order_decides(problem, options):
        return proof_of(problem, costs, options) is not None
    with suppress(InfeasibleError):
        plan(problem, costs, options)
        return True
    return False


def _largest(fits: Callable[[int], bool], multiple: int, most: int, guess: int) -> tuple[int | None, int]:
    """Find the largest multiple up to `most` that fits, to within a relatively small step; return it and the step.

    From a guess on, strides double until one number fits and one does not; then the distance between them is halved.
    """
    most = most // multiple * multiple
    unit = multiple << max(0, (guess // _SIZES_PER_DOUBLING // multiple).bit_length() - 1)
    at, stride = min(max(guess // unit * unit, multiple), most), unit
    if fits(at):
        low, high = at, min(at + stride, most)
        while low < most and fits(high):
            stride *= 2
            low, high = high, min(high + stride, most)
        if low == most:
            return most, 0
    else:
        low, high = max(at - stride, multiple), at
        while low == high or not fits(low):
            if low == multiple:
                return None, multiple
            stride *= 2
            low, high = max(low - stride, multiple), low
    step = multiple << max(0, (low // _SIZES_PER_DOUBLING // multiple).bit_length() - 1)
    while high - low > step:
        middle = low + max(step, (high - low) // 2 // step * step)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high - low
