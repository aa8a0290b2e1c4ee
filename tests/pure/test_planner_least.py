"""The least memory of a batch: ranks with equal costs need the same, so one of each kind tells."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.check import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.least import has_plan, least_plan
from megatron_epp.planner.message_room import MessageRoomError, with_room
from megatron_epp.planner.problem import static_bytes
from megatron_epp.planner.result import greedy
from megatron_epp.planner.work_limit import WITH_COPIES, WorkSpentError, limited, spend
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem, web_lengths

LENGTHS = (*web_lengths(20, seed=5, longest=20_000), 40_000)


def test_ranks_with_other_layers_or_caps_are_looked_at_too():
    costs = pipeline(8, 2)
    deeper = replace(costs, stages=(*costs.stages[:3], pipeline(8, 4).stages[3], *costs.stages[4:]))
    asked = problem(LENGTHS, 8)
    assert least_cap_bytes(asked, deeper, Options()) > least_cap_bytes(asked, costs, Options())
    lower = replace(asked, cap_bytes=(*[60 * GIB] * 5, 1 * GIB, *[60 * GIB] * 2))
    with pytest.raises(InfeasibleError):
        least_plan(lower, costs, Options())


def test_the_first_plan_found_is_sound_and_within_the_cap():
    costs = pipeline(8, 2)
    cap = int(1.05 * least_cap_bytes(problem(LENGTHS, 8), costs, Options()))
    made = least_plan(problem(LENGTHS, 8, cap), costs, Options())
    assert check(made) == []
    assert max(made.predicted.peak_bytes) <= cap
    with pytest.raises(InfeasibleError) as refused:
        least_plan(problem(LENGTHS, 8, cap // 2), costs, Options())
    assert refused.value.least_cap_bytes > cap // 2


@pytest.mark.parametrize("budget_ms", [None, 20])
def test_where_messages_of_fast_plans_are_too_many_there_is_one_no_slower_than_that_of_the_least_memory(
    budget_ms: int | None,
):
    costs = replace(pipeline(2, 2), message_bytes_per_token=200_000.0)
    options, asked = Options(budget_ms=budget_ms), problem(web_lengths(8, seed=1, longest=6_000), 2)
    with pytest.raises(InfeasibleError) as refused:
        least_plan(replace(asked, cap_bytes=(1, 1)), costs, options)
    tight = replace(asked, cap_bytes=(refused.value.least_cap_bytes,) * 2)
    with pytest.raises((InfeasibleError, MessageRoomError)):
        with_room(tight, lambda one: build_plan(one, costs, options, greedy(one, costs, options)))
    made = plan(tight, costs, options)
    assert made.predicted.makespan_us <= least_plan(tight, costs, options).predicted.makespan_us
    assert check(made) == []
    assert has_plan(tight, costs, options)
    lower = replace(tight, cap_bytes=tuple(cap // 2 for cap in tight.cap_bytes))
    assert not has_plan(lower, costs, options)
    with pytest.raises(InfeasibleError) as named:
        plan(lower, costs, options)
    assert named.value.least_cap_bytes == refused.value.least_cap_bytes


def test_a_refusal_with_offload_names_a_cap_that_does_without():
    asked, costs, options = problem(LENGTHS, 4), pipeline(4, 2), Options(offload=True, slices=4)
    tight = replace(asked, cap_bytes=(int(max(static_bytes(asked, costs)) * 1.001),) * 4)
    with pytest.raises(InfeasibleError, match=r"That would do without offload; with it less may do") as refused:
        plan(tight, costs, options)
    assert "offload" not in {remedy.setting for remedy in refused.value.remedies}
    enough = replace(asked, cap_bytes=(refused.value.least_cap_bytes,) * 4)
    assert check(plan(enough, costs, replace(options, offload=False))) == []


def test_work_is_counted_up_to_its_limit_and_within_that_of_the_block_around_it():
    with limited(100) as outer:
        with limited(math.inf) as inner:
            spend(10, WITH_COPIES)
            with pytest.raises(WorkSpentError):
                spend(21)
        assert inner.steps == outer.steps == 10 * WITH_COPIES
        spend(20)
        with pytest.raises(WorkSpentError):
            spend(1)
    spend(1_000)


@pytest.mark.parametrize("options", [Options(), Options(offload=True)], ids=str)
def test_equal_batches_take_equal_work(options: Options):
    asked, costs = problem(LENGTHS, 4, 60 * GIB), pipeline(4, 2)
    found = []
    for _ in range(2):
        with limited(math.inf) as work:
            plan(asked, costs, options)
        found.append(work.steps)
    assert found[0] == found[1] > 0
