"""Windows as large as the caps allow, and other sequences before the longest, where a plan is far from its bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from megatron_epp.plan import UNLIMITED_BYTES, Op
from megatron_epp.plan.check import check
from megatron_epp.planner import Chunker, Options, WarmUp, fitted, plan, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunk_tables import with_other_starts
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.warm_up import CappedWarmUp
from tests.support.plan.planner_cases import pipeline, problem

STAGES = 4
COSTS = pipeline(STAGES)
LENGTHS = (60000, 16000, 9000, *[5000] * 4, *[2000] * 24)
BATCH = problem(LENGTHS, STAGES, token_multiple=16)
CHUNKER = Chunker.of(BATCH, COSTS, None)
TABLE = CHUNKER.table(CHUNKER.grain(chunks=12 * STAGES))


def capped(share: float):
    """The batch with a cap between the peaks of the smallest and of the largest window."""
    tables = tabulate(TABLE, BATCH, COSTS)
    none = [[0] * len(TABLE)] * STAGES
    least, most = (max(peaks_bytes(WarmUp(3, minimal).order(TABLE, tables, BATCH), tables, none)) for minimal in (True, False))
    assert least < most
    return replace(BATCH, cap_bytes=(int(least + share * (most - least)),) * STAGES)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_window_takes_about_what_the_caps_leave(share: float):
    asked = capped(share)
    tables = tabulate(TABLE, asked, COSTS)
    order = CappedWarmUp(3).order(TABLE, tables, asked)
    peaks = peaks_bytes(order, tables, [[0] * len(TABLE)] * STAGES)
    assert all(peak <= 1.01 * cap for peak, cap in zip(peaks, asked.cap_bytes, strict=True)), "recompute does the rest"
    if share == 1.0:
        assert order == WarmUp(3).order(TABLE, tables, asked)
    assert check(build_plan(asked, COSTS, Options(), fitted(order, TABLE, asked, COSTS))) == []


def test_without_a_cap_the_window_is_the_largest_and_in_an_evaluation_there_is_none():
    tables = tabulate(TABLE, BATCH, COSTS)
    assert CappedWarmUp(2).order(TABLE, tables, BATCH) == WarmUp(2).order(TABLE, tables, BATCH)
    evaluation = replace(BATCH, forward_only=True)
    order = CappedWarmUp(2).order(TABLE, tabulate(TABLE, evaluation, COSTS), evaluation)
    assert {action.op for action in chain.from_iterable(order)} == {Op.F}


def test_other_sequences_come_first_and_none_is_lost_or_parted():
    groups = [[TABLE[c] for c in group] for group in slice_groups(TABLE)]
    for table in with_other_starts(TABLE, STAGES):
        found = [[table[c] for c in group] for group in slice_groups(table)]
        assert found[0] != groups[0]
        assert sorted(found, key=str) == sorted(groups, key=str)
    (single, *_), (alone, *_) = with_other_starts(groups[0], STAGES)
    assert single == alone == groups[0][0], "a sequence alone has nothing before it"


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)])
def test_the_bound_counts_what_a_sequence_keeps_on_all_stages_of_a_rank(placement: tuple[int, ...]):
    free = replace(problem((60000,), 4), placement=placement, cap_bytes=(UNLIMITED_BYTES,) * 2)
    made = plan(free, COSTS, Options(slices=8))
    asked = replace(free, cap_bytes=(int(0.7 * max(made.predicted.peak_bytes)),) * 2)
    tables = tabulate(made.chunks, asked, COSTS)
    tight = plan(asked, COSTS, Options(slices=8)).predicted
    assert lower_bound_us(tables) < lower_bound_us(tables, made.chunks, asked)
    assert tight.lower_bound_us <= tight.makespan_us
