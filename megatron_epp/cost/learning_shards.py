"""Costs of vocabulary shards and of their collectives, fitted to measured iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megatron_epp.cost.timed import Learnt, Timed, fitted_line
from megatron_epp.cost.vocabulary import VocabularyShards
from megatron_epp.cost.work import Line
from megatron_epp.plan import Op


def fitted_shards(base: VocabularyShards, everyone: Sequence[Learnt]) -> VocabularyShards:
    """Fit the times of vocabulary shards to the measurements of all ranks. What was not measured stays.

    Args:
        base: costs by formula, whose shares and bytes stay.
        everyone: measurements of every rank.
    """
    return replace(
        base,
        logits=_pass(base, Op.S, base.logits, everyone),
        gradient=_pass(base, Op.T, base.gradient, everyone),
        spread=fitted_line(base.spread, _collectives(Op.SPREAD, len(base.shares), everyone), pairs=False),
        gather=fitted_line(base.gather, _collectives(Op.GATHER, len(base.shares), everyone), pairs=False),
    )


def _pass(shards: VocabularyShards, op: Op, earlier: Line, everyone: Sequence[Learnt]) -> Line:
    """Fit the line of an operation for the whole vocabulary: a line for each rank's shard, of which the slowest counts.

    A pass of a chunk ends with its slowest rank, since a collective of all ranks follows.
    """
    found, tokens = [], []
    for rank in range(len(shards.shares)):
        times = [timed for one in everyone for timed in one.times.get((rank, op), ())]
        if times:
            found.append(shards.of_whole(fitted_line(shards.of_shard(earlier, rank), times, pairs=False), rank))
            tokens += [timed.tokens for timed in times]
    return max(found, key=lambda line: line.time_us(fmean(tokens), 0), default=earlier)


def _collectives(op: Op, num_ranks: int, everyone: Sequence[Learnt]) -> list[Timed]:
    """Return the time of every collective: the least of its pipeline's ranks.

    The rank that enters last waits for no other, so its time is the collective's; the times of other ranks contain their waits.
    Collectives that some rank has not measured are left out.
    """
    found: dict[tuple[int, int, int], list[Timed]] = {}
    for one in everyone:
        for (name, iteration, chunk), timed in one.collectives.items():
            if name is op:
                found.setdefault((one.pipeline, iteration, chunk), []).append(timed)
    return [min(times, key=lambda timed: timed.time_us) for times in found.values() if len(times) == num_ranks]
