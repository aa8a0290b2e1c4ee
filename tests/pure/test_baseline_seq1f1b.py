"""Seq1F1B with chunks of a fixed size."""

from __future__ import annotations

import pytest

from megatron_epp.plan import Op, Plan
from megatron_epp.planner import Options, plan
from megatron_epp.planner.baselines.contest import chunk_sizes, fixed_size_chunks
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from tests.support.plan.planner_cases import pipeline, problem, web_lengths

LENGTHS = (50_000, 9000, *web_lengths(60, seed=2, longest=20_000))


@pytest.mark.parametrize("size", [1000, 4096, 30_000])
def test_slices_are_of_the_chunk_size_and_nothing_is_larger(size: int):
    chunks = fixed_size_chunks(LENGTHS, size)
    slices = [s for chunk in chunks for s in chunk.segments if s.end < LENGTHS[s.sequence]]
    assert slices
    assert {s.end - s.start for s in slices} == {size}
    assert max(chunk.num_tokens for chunk in chunks) <= size
    assert sum(chunk.num_tokens <= size // 2 for chunk in chunks[-20:]) <= 20


def test_short_sequences_fill_up_tails_first():
    chunks = fixed_size_chunks((2500, 400, 300, 900), 1000)
    assert [[(s.sequence, s.start, s.end) for s in chunk.segments] for chunk in chunks] == [
        [(0, 0, 1000)],
        [(0, 1000, 2000)],
        [(0, 2000, 2500), (1, 0, 400)],
        [(2, 0, 300)],
        [(3, 0, 900)],
    ]


def most_alive(made: Plan, rank: int) -> int:
    alive = peak = 0
    for action in made.actions(rank):
        alive += 1 if action.op is Op.F else -1
        peak = max(peak, alive)
    return peak


def test_a_rank_keeps_as_many_chunks_as_stages_follow_and_slices_the_longest_has():
    made = plan(problem(LENGTHS, 4), pipeline(4), Options(planner="seq1f1b", chunk_tokens=8192))
    assert [most_alive(made, rank) for rank in range(4)] == [4 - 1 - rank + 7 for rank in range(4)]


def test_equal_slices_leave_only_the_bubbles_of_filling_and_draining():
    groups = [range(4), range(4, 8), range(8, 12)]
    (first, *_, last) = seq1f1b_order(groups, 3)
    assert "".join(action.op for action in last) == "FFFF" + "BF" * 8 + "BBBB"
    assert "".join(action.op for action in first) == "FFFFFF" + "BF" * 6 + "BBBBBB"
    assert [action.chunk for action in last if action.op is Op.B] == [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8]


def test_the_size_is_the_best_of_those_tried():
    asked = problem(LENGTHS, 4)
    best = plan(asked, pipeline(4), Options(planner="seq1f1b")).predicted.makespan_us
    sizes = chunk_sizes(asked, Options())
    assert len(sizes) >= 8
    each = [plan(asked, pipeline(4), Options(planner="seq1f1b", chunk_tokens=s)).predicted.makespan_us for s in sizes]
    assert best == min(each) < max(each)
