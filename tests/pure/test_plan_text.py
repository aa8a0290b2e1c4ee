"""The grid form."""

import pytest
from hypothesis import given

from megatron_epp.plan import Action, Op, PlanError, from_grid, lower, to_grid
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import offload, one_f_one_b


def test_the_grid_has_a_line_per_rank():
    assert to_grid(one_f_one_b()) == "rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1 | 1F0 1B0 1F1 1B1 1F2 1B2\n"


def test_copies_follow_in_lines_of_their_own():
    assert to_grid(offload()).splitlines()[2:] == ["copy 0 | 0O0 0L0", "copy 1 |"]


def test_rank_numbers_line_up():
    lines = to_grid([[Action(Op.F, rank, 0)] for rank in range(11)]).splitlines()
    assert lines[0] == "rank  0 | 0F0"
    assert lines[10] == "rank 10 | 10F0"


@given(sound_plans())
def test_the_grid_reads_back(plan):
    text = to_grid(plan)
    assert from_grid(text) == tuple(plan.actions(rank) for rank in range(plan.num_ranks))
    copies = tuple(tuple(step.action for step in steps) for steps in plan.copies)
    assert from_grid(text, block="copy") == (copies if any(copies) else ())


@given(sound_plans())
def test_a_lowered_plan_reads_back(plan):
    rows = lower(plan)
    assert from_grid(to_grid(rows)) == rows


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank 0 | 0F0\nrank 2 | 1F0", "line 2 of the grid is rank 2; expected rank 1"),
        ("rank 0 | 0F0\nrank 0 | 1F0", "line 2 of the grid is rank 0; expected rank 1"),
        ("0F0 0F1", "expected 'rank <n>"),
        ("rank 0 | 0F0 0Q0", "'0Q0' is not an action"),
    ],
)
def test_what_is_no_grid_is_refused(text, reason):
    with pytest.raises(PlanError, match=reason):
        from_grid(text)
