"""Recompute under memory caps: how many layers of each stage and chunk run their forward again in backward.

Memory of a rank depends on the order of its actions, not on times, so it is counted along its list, as a plan's steps have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Action
from megatron_epp.plan.problem import Options
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.kernels import live_bytes as inner
from megatron_epp.planner.kernels.codes import KIND_BITS, Codes, encode_known
from megatron_epp.planner.kernels.compiled import IntegerList, integer_zeros, integers, numbers
from megatron_epp.planner.kernels.live_bytes import fit, fit_rank, peak
from megatron_epp.planner.kernels.pass_table import PassTable
from megatron_epp.planner.kernels.timing import mark_split
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables

Sharing = Callable[[Sequence[Action], Tables, list[int], list[int]], None]
"""Change of the bytes that the actions of a rank take and give, in place, where several actions hold their bytes at once."""


@dataclass(frozen=True, slots=True)
class RecomputeFit:
    """Recompute that keeps every rank under its cap, ``[stage][chunk]``; or None, and the least peak of the rank that needs
    most: the smallest cap that would suffice.
    """

    recompute_steps: RecomputeSteps | None
    needed_bytes: int = 0

    @staticmethod
    def of(recompute_steps: RecomputeSteps, peaks: Sequence[int], caps: Sequence[int]) -> RecomputeFit:
        return RecomputeFit(recompute_steps) if is_within(peaks, caps) else RecomputeFit(None, max(peaks))


def is_within(peaks: Sequence[int], caps: Sequence[int]) -> bool:
    return all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))


def fit_recompute(
    order: Order | Codes, tables: Tables, caps: Sequence[int], options: Options, by_stay: bool = False
) -> RecomputeFit:
    """Keep every rank under its cap with as little recompute time as the greedy rule of `fit_rank` finds.

    When recompute of everything meets the caps, they are met (`least_peaks`). `by_stay` prefers chunks that stay long.
    """
    codes, columns = _coded(order, tables)
    items = columns.num_stages * columns.num_chunks
    if options.recompute != "auto" or not tables.trains:
        recompute_steps = uniform_steps(tables, options.recompute if options.recompute != "auto" and tables.trains else 0)
        return RecomputeFit.of(recompute_steps, peaks_bytes(codes, tables, recompute_steps), caps)
    column, leaves, allowed = integer_zeros(items), integer_zeros(items), caps_at(codes, caps)
    if not fit(codes.actions, codes.starts, columns, integers(caps), allowed, column, leaves, int(by_stay)):
        return RecomputeFit(None, max(least_peaks(codes, tables)))
    return RecomputeFit(by_stage(column, columns.num_chunks))


def fit_lockstep(
    codes: Codes, tables: Sequence[Tables], caps: Sequence[Sequence[int]], options: Options, by_stay: bool = False
) -> RecomputeFit:
    """Keep every rank of every replica, whose times are equal (`replicas.slowest_times`), under its cap by equal recompute.

    The maximum over what each replica needs by itself is taken; with more recompute none holds more. Recompute that the
    replicas then do not need is taken back, dearest first.
    """
    fits = [fit_recompute(codes, own, allowed, options, by_stay) for own, allowed in zip(tables, caps, strict=True)]
    if len(fits) == 1:
        return fits[0]
    if any(fit.recompute_steps is None for fit in fits):
        return RecomputeFit(None, max(fit.needed_bytes for fit in fits))
    columns = [list(chain.from_iterable(fit.recompute_steps or ())) for fit in fits]
    together = [max(each) for each in zip(*columns, strict=True)]
    # Of 16 batches of four unequal replicas, plans of 1 were 0.8 % slower without; in which order it is taken back made no
    # difference above 0.02 %.
    if options.recompute == "auto" and any(column != together for column in columns):
        return RecomputeFit(_trimmed(together, codes, tables, caps))
    return RecomputeFit(by_stage(integers(together), tables[0].columns.num_chunks))


def _trimmed(together: list[int], codes: Codes, tables: Sequence[Tables], caps: Sequence[Sequence[int]]) -> RecomputeSteps:
    columns, recompute_steps = tables[0].columns, integers(together)
    for rank in range(codes.num_ranks):
        begin, stop = codes.starts[rank], codes.starts[rank + 1]
        items = sorted(
            {int(action) >> KIND_BITS for action in codes.actions[begin:stop]}, key=lambda item: (-columns.dear_us[item], item)
        )
        for item in items:
            while recompute_steps[item] > 0:
                recompute_steps[item] -= 1
                if any(
                    peak(codes.actions, begin, stop, own.columns, recompute_steps, own.static[rank]) > allowed[rank]
                    for own, allowed in zip(tables, caps, strict=True)
                ):
                    recompute_steps[item] += 1
                    break
    return by_stage(recompute_steps, columns.num_chunks)


def fit_with_copies(
    codes: Codes, tables: Tables, rank: int, caps: Sequence[int], limit: RecomputeSteps, recompute_steps: RecomputeSteps
) -> bool:
    """Fit the recompute of a rank whose cap differs from action to action, since some bytes are away; True if any fits."""
    columns, actions = tables.columns, codes.actions[codes.starts[rank] : codes.starts[rank + 1]]
    items = columns.num_stages * columns.num_chunks
    column, leaves, most = integer_zeros(items), integer_zeros(items), integers(chain.from_iterable(limit))
    static = tables.static[rank]
    if not fit_rank(actions, 0, len(actions), columns, most, integers(caps), static, column, leaves, 0):
        return False
    fitted_steps = by_stage(column, columns.num_chunks)
    for stage in tables.stages_of[rank]:
        recompute_steps[stage] = fitted_steps[stage]
    return True


def caps_at(codes: Codes, caps: Sequence[int]) -> IntegerList:
    """Every rank's cap, by position among the codes' actions."""
    return integers(np.repeat(np.array(caps, dtype=np.int64), np.diff(codes.starts)))


def peaks_bytes(order: Order | Codes, tables: Tables, recompute_steps: RecomputeSteps) -> list[int]:
    return _peaks(order, tables, integers(chain.from_iterable(recompute_steps)))


def least_peaks(order: Order | Codes, tables: Tables) -> list[int]:
    """Compute the least peak of each rank that recompute can reach, with all layers of all chunks recomputed.

    More recompute never raises an action's peak, but for a norm's output, which a layer has while its own backward runs only
    where it recomputes more than its MLP (`ModeCosts.full_bytes_per_token`).
    """
    return _peaks(order, tables, tables.columns.most)


def step_bytes(
    order: Order | Codes, tables: Tables, recompute_steps: RecomputeSteps, sharing: Sharing | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Compute the bytes that every action allocates when it starts and frees when it ends, ``[rank][position]``.

    `sharing` changes the bytes of a rank's actions, which are then no codes; None if every action holds its own.
    """
    codes, columns = _coded(order, tables)
    count, split = len(codes.actions), integer_zeros(columns.num_items)
    takes, gives = integer_zeros(count), integer_zeros(count)
    mark_split(codes.actions, split)
    inner.step_bytes(codes.actions, columns, integers(chain.from_iterable(recompute_steps)), split, takes, gives)
    rows = [slice(codes.starts[rank], codes.starts[rank + 1]) for rank in range(codes.num_ranks)]
    allocated, freed = ([column[row] for row in rows] for column in (numbers(takes), numbers(gives)))
    if sharing is not None and not isinstance(order, Codes):
        for actions, *own in zip(order, allocated, freed, strict=True):
            sharing(actions, tables, *own)
    return allocated, freed


def held_bytes(
    order: Order | Codes, tables: Tables, recompute_steps: RecomputeSteps, sharing: Sharing | None = None
) -> list[NDArray[np.int64]]:
    """Bytes live while each action runs, ``[rank][position]``."""
    rows = zip(tables.static, *step_bytes(order, tables, recompute_steps, sharing), strict=True)
    return [static + np.cumsum(takes) - np.cumsum([0, *gives])[:-1] for static, takes, gives in rows]


def peaks_of(held: Sequence[NDArray[np.int64]]) -> list[int]:
    """Largest entry of each rank's row of `held_bytes`."""
    return [int(row.max(initial=0)) for row in held]


def uniform_steps(tables: Tables, count: int) -> RecomputeSteps:
    """Return the same number of recompute steps for every chunk, or the layers of a stage that has fewer."""
    return [[min(count, most)] * tables.num_chunks for most in tables.num_layers]


def by_stage(column: IntegerList, num_chunks: int) -> RecomputeSteps:
    entries = numbers(column)
    return [entries[at : at + num_chunks] for at in range(0, len(entries), num_chunks)]


def _coded(order: Order | Codes, tables: Tables) -> tuple[Codes, PassTable]:
    codes = order if isinstance(order, Codes) else encode_known(order, tables.num_chunks)
    return codes, tables.columns_with(codes.kinds)


def _peaks(order: Order | Codes, tables: Tables, recompute_steps: IntegerList) -> list[int]:
    codes, columns = _coded(order, tables)
    return [
        int(peak(codes.actions, codes.starts[rank], codes.starts[rank + 1], columns, recompute_steps, static))
        for rank, static in enumerate(tables.static)
    ]
