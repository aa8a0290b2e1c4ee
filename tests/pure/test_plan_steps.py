"""Steps of several actions, and chunks whose loss is computed together."""

from dataclasses import replace
from itertools import pairwise

from megatron_epp.plan import Action, Op, Prediction, check, from_grid, from_json, lower, simulate, to_grid, to_json
from megatron_epp.plan.check.deadlock import blocked
from tests.support.plan.small_plans import one_f_one_b


def joined(plan, rank, at):
    """The plan with two neighbouring steps of a rank as one, which takes as long as the longer of them."""
    row = plan.ranks[rank]
    one, two = row[at : at + 2]
    both = one._replace(
        time_us=max(one.time_us, two.time_us),
        alloc_bytes=one.alloc_bytes + two.alloc_bytes,
        free_bytes=one.free_bytes + two.free_bytes,
        also=two.actions,
    )
    ranks = (*plan.ranks[:rank], (*row[:at], both, *row[at + 2 :]), *plan.ranks[rank + 1 :])
    return replace(plan, ranks=ranks, predicted=Prediction.none(plan.num_ranks), cap_bytes=(1 << 40,) * plan.num_ranks)


def first_pair(plan, rank):
    """Where a backward is followed by a forward."""
    row = plan.actions(rank)
    return next(i for i, (one, two) in enumerate(pairwise(row)) if (one.op, two.op) == (Op.B, Op.F))


def test_a_step_of_two_actions_is_checked_simulated_lowered_and_survives_text():
    plan = one_f_one_b()
    braided = joined(plan, 0, first_pair(plan, 0))
    assert check(braided) == []
    assert simulate(braided).makespan_us < simulate(plan).makespan_us
    assert from_json(to_json(braided)) == braided
    grid = to_grid(braided)
    assert "+" in grid
    assert from_grid(grid) == tuple(plan.actions(rank) for rank in range(plan.num_ranks))
    rows = lower(braided)
    assert sorted(map(str, rows[0])) == sorted(map(str, lower(plan)[0]))
    assert blocked([rows]) == []


def test_actions_of_one_step_wait_for_what_each_of_them_needs():
    plan = one_f_one_b()
    at = first_pair(plan, 0)
    line, alone = simulate(joined(plan, 0, at)), simulate(plan)
    assert line.start_us[0][at] >= alone.start_us[0][at]


def test_a_step_whose_actions_need_each_other_by_way_of_another_rank_is_a_deadlock():
    plan = one_f_one_b()
    chunk = plan.actions(1)[0].chunk
    row = [step for step in plan.ranks[0] if step.action.chunk != chunk]
    forward, backward = (next(s for s in plan.ranks[0] if s.action == Action(op, 0, chunk)) for op in (Op.F, Op.B))
    both = forward._replace(also=(backward.action,))
    faults = check(replace(plan, ranks=((both, *row), *plan.ranks[1:]), predicted=Prediction.none(plan.num_ranks)))
    assert any("deadlock" in str(fault) for fault in faults)


def test_actions_of_one_step_that_need_each_other_are_refused():
    plan = one_f_one_b()
    last = plan.placement[plan.num_stages - 1]
    faults = check(joined(plan, last, 0))  # a chunk's forward and its backward
    assert [str(fault) for fault in faults if "one action of its step needs the other" in str(fault)]


def test_backwards_of_a_loss_group_wait_for_all_its_forwards_on_the_last_stage():
    plan = one_f_one_b()
    last = plan.num_stages - 1
    row = plan.actions(plan.placement[last])
    early, late = row[0].chunk, [a for a in row if a.op is Op.F][-1].chunk
    assert check(replace(plan, loss_groups=((early,), (late,)))) == []
    grouped = replace(plan, loss_groups=((early, late),))
    assert from_json(to_json(grouped)) == grouped
    faults = check(grouped)
    assert faults
    assert f"runs before {last}F{late}" in str(faults[0])
    assert "name a chunk twice" in str(check(replace(plan, loss_groups=((0,), (0,))))[0])
