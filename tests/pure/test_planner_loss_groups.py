"""Sequences whose loss is computed together: their backwards wait for all their forwards, and they stay next to each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.plan import Chunk, Plan, PlanError, Segment
from megatron_epp.planner import PLANNERS, Options, plan, slice_groups
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.order import arranged, joint_losses
from megatron_epp.planner.planners import PLANNERS as CORE
from megatron_epp.planner.service.replica_balance import divide
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths

PAIRS = tuple(number // 2 for number in range(40))


def chunks_of(made: Plan, loss_groups: tuple[int, ...], number: int) -> set[int]:
    """Chunks with a part of a group."""
    return {c for c, chunk in enumerate(made.chunks) for s in chunk.segments if loss_groups[s.sequence] == number}


def test_short_groups_share_chunks_and_long_ones_stay_together():
    lengths = (60000, 40000, 20000, 500, *[300] * 36)
    asked = replace(problem(lengths, 4, 70 * GIB), loss_groups=PAIRS)
    made = plan(asked, pipeline(4), Options())
    spread = [number for number in range(20) if len(chunks_of(made, PAIRS, number)) > 1]
    assert spread == [0, 1]
    assert len(made.loss_groups) == 2
    assert [range(group[0], group[-1] + 1) for group in made.loss_groups] == [
        run for run in slice_groups(made.chunks, PAIRS) if len(run) > 1
    ]
    assert max(len(chunk.segments) for chunk in made.chunks) > 2


def test_groups_cost_little_where_they_fit_chunks():
    lengths = web_lengths(40, seed=4, longest=4000)
    free = plan(problem(lengths, 4), pipeline(4), Options())
    paired = plan(replace(problem(lengths, 4), loss_groups=PAIRS), pipeline(4), Options())
    assert paired.predicted.makespan_us < 1.05 * free.predicted.makespan_us


def test_one_group_for_each_sequence_changes_nothing_but_what_the_plan_says():
    asked = problem((60000, *web_lengths(20, seed=2)), 4, 40 * GIB)
    free = plan(asked, pipeline(4), Options())
    alone = plan(replace(asked, loss_groups=tuple(range(21))), pipeline(4), Options())
    assert replace(alone, loss_groups=()) == free
    assert alone.loss_groups[0] == tuple(c for c, chunk in enumerate(alone.chunks) if chunk.segments[0].sequence == 0)


def test_replicas_get_whole_groups():
    asked = replace(problem(web_lengths(40, seed=3), 2), loss_groups=tuple(reversed(PAIRS)))
    alone = tuple((replica,) for replica in range(3))
    costs = pipeline(2)
    division = divide(asked, costs, alone, lambda shares: max(about_us(share, costs, Options()) for share in shares))
    assert sorted(at for share in division.shares for at in share) == list(range(40))
    of = [{asked.loss_groups[at] for at in share} for share in division.shares]
    assert sum(map(len, of)) == len(set.union(*of)) == 20


def test_more_replicas_than_groups_are_refused():
    asked = replace(problem((5, 6, 7, 8), 2), loss_groups=(0, 0, 0, 1))
    with pytest.raises(PlanError, match="2 groups of sequences cannot be shared by 3 replicas"):
        divide(asked, pipeline(2), ((0,), (1,), (2,)), lambda shares: 1.0)


def test_as_many_groups_as_sequences_are_needed():
    with pytest.raises(PlanError, match="loss groups of 1 sequences, and lengths of 2"):
        plan(replace(problem((5, 6), 2), loss_groups=(0,)), pipeline(2))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200)
def test_arranged_tables_have_the_same_chunks_with_every_group_in_one_run(groups: list[int], draw: random.Random):
    sizes = [draw.randint(1, 3) for _ in groups]
    runs = [[Chunk((Segment(q, at, at + 1),)) for at in range(size)] for q, size in enumerate(sizes)]
    draw.shuffle(runs)
    table = tuple(chunk for run in runs for chunk in run)
    found = arranged(table, groups)
    assert sorted(map(repr, found)) == sorted(map(repr, table))
    for q, size in enumerate(sizes):
        assert [c.segments[0].start for c in found if c.segments[0].sequence == q] == list(range(size))
    for group in joint_losses(found, groups):
        assert group == tuple(range(group[0], group[-1] + 1))


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - set(CORE)))
def test_other_planners_refuse_losses_over_several_sequences(planner: str):
    asked = problem((5, 6), 2)
    with pytest.raises(PlanError, match="orders each sequence by itself, and the batch has losses over several"):
        plan(replace(asked, loss_groups=(3, 3)), pipeline(2), Options(planner=planner))
