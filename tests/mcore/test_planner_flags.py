"""Flags about planning that do not go together are refused by name."""

import pytest
from megatron_flags import arguments

from megatron_epp.mcore.args import ArgumentError, prepare_epp_args


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--epp-plan-budget-ms", "0"], "--epp-plan-budget-ms is 0; it must be at least 1"),
        (["--epp-plan-budget-ms", "9", "--epp-planner", "milp"], "--epp-plan-budget-ms is for --epp-planner greedy, not milp"),
        (["--epp-recompute", "1", "--epp-planner", "milp"], "leave --epp-recompute at auto"),
        (["--epp-plan-budget-ms", "2000", "--epp-wait-limit-seconds", "2"], "2000 is not below --epp-wait-limit-seconds 2"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(given, says):
    with pytest.raises(ArgumentError, match=says):
        prepare_epp_args(arguments(*given))


@pytest.mark.parametrize("given", [[], ["--epp-planner", "milp"], ["--epp-plan-budget-ms", "500"]])
def test_others_are_not(given):
    prepare_epp_args(arguments(*given))
