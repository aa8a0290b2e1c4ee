"""Weight gradients split off: they run in the gaps of their ranks."""

from __future__ import annotations

import pytest

from megatron_epp.planner import Chunker, WarmUp, tabulate
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.kernels.codes import KIND_MASK, WEIGHT, coded
from megatron_epp.planner.kernels.split import EAGER, WHOLE
from megatron_epp.planner.memory.offload import Offload
from megatron_epp.planner.orders.completion import split_weights, with_split_weights
from tests.support.plan.planner_cases import pipeline, problem, web_lengths

RANKS = 4


def one_f_one_b(seed: int):
    """A batch in slices, its tables, an order of whole backwards, and no recompute."""
    asked, costs = problem(web_lengths(40, seed, longest=65536), RANKS), pipeline(RANKS)
    chunker = Chunker.of(asked, costs, None)
    chunks = chunker.table(chunker.grain(chunks=6 * RANKS))
    tables = tabulate(chunks, asked, costs)
    return asked, tables, coded(WarmUp(1).order(chunks, tables, asked), len(chunks)), [[0] * len(chunks)] * RANKS


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_run_in_gaps_shorter_than_themselves_do_not_all_wait_for_the_end(seed: int):
    asked, tables, order, steps = one_f_one_b(seed)
    whole, eager = (split_weights(order.codes, tables, steps, asked.cap_bytes, (), share) for share in (WHOLE, EAGER))
    assert makespan_us(eager, tables, steps) < 0.98 * makespan_us(whole, tables, steps)
    assert makespan_us(whole, tables, steps) < makespan_us(order, tables, steps)
    last = [[int(code) & KIND_MASK == WEIGHT for code in row.actions[row.starts[0] : row.starts[1]]] for row in (whole, eager)]
    ends = [row[::-1].index(False) for row in last]
    assert ends[1] < ends[0], "fewer are left for the end of the first rank"


@pytest.mark.parametrize("seed", range(4))
def test_the_faster_of_both_ways_counts(seed: int):
    asked, tables, order, steps = one_f_one_b(seed)
    found, took_us = with_split_weights(order, tables, Offload(steps, (), ()), asked.cap_bytes)
    both = [
        makespan_us(split_weights(order.codes, tables, steps, asked.cap_bytes, (), share), tables, steps)
        for share in (WHOLE, EAGER)
    ]
    assert took_us == makespan_us(found, tables, steps)
    assert took_us <= min(both)
