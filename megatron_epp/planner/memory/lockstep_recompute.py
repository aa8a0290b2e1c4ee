"""Recompute of one or several lockstep replicas: as much of each chunk as the replica with the least room there needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.kernels.columns import KIND_BITS, Codes
from megatron_epp.planner.kernels.compiled import integers
from megatron_epp.planner.kernels.memory import peak
from megatron_epp.planner.memory.recompute import Fit, by_stage, coded, fit_recompute
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.problem import Options
from megatron_epp.planner.tables import Tables


def fit_lockstep(order: Order | Codes, tables: Sequence[Tables], caps: Sequence[Sequence[int]], options: Options) -> Fit:
    """Keep every rank of every replica under its cap with the same recompute in all.

    The maximum over what each replica needs by itself is taken; with more recompute none holds more. Recompute that
    the replicas then do not need is taken back, dearest first.

    Args:
        order: the order of all replicas.
        tables: of every replica; their times are the same (`replicas.slowest_times`).
        caps: of the ranks of every replica.
        options: the user's settings.
    """
    fits = [fit_recompute(order, own, allowed, options) for own, allowed in zip(tables, caps, strict=True)]
    if len(fits) == 1:
        return fits[0]
    if any(fit.recompute_steps is None for fit in fits):
        return Fit(None, max(fit.needed_bytes for fit in fits))
    found = [list(chain.from_iterable(fit.recompute_steps or ())) for fit in fits]
    together = [max(each) for each in zip(*found, strict=True)]
    if options.recompute == "auto" and any(one != together for one in found):
        return Fit(_trimmed(together, order, tables, caps))
    return Fit(by_stage(integers(together), tables[0].columns.num_chunks))


def _trimmed(
    together: list[int], order: Order | Codes, tables: Sequence[Tables], caps: Sequence[Sequence[int]]
) -> RecomputeSteps:
    columns, codes, recompute_steps = tables[0].columns, coded(order, tables[0]), integers(together)
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
