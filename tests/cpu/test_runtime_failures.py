"""No rank is left hanging: what fails or hangs on one ends all, and says where."""

from dataclasses import replace

import pytest
from failing_runs import agree_on, fail, hang, longer, run_with_fault
from rank_processes import Ranks, run_until_exit
from runtime_plans import SLICED_THEN_WHOLE, by_hand, planned, two_ranks

from megatron_epp.runtime.watchdog import EXIT_CODE
from megatron_epp.schedule import digest, to_grid

LIMIT_S = 4


@pytest.mark.parametrize(("faulty_rank", "action"), [(0, "F1"), (1, "F0"), (1, "B1")])
def test_an_error_on_one_rank_ends_both_with_the_action_the_rank_and_the_grid(tmp_path, faulty_rank, action):
    plan = two_ranks()
    ended = run_until_exit(2, tmp_path, run_with_fault, plan, faulty_rank, action, fail)
    failed, other = ended[faulty_rank], ended[1 - faulty_rank]
    assert failed.exit_code == 1
    assert f"RunError: pipeline rank {faulty_rank}, step" in failed.stderr
    assert f"action {faulty_rank}{action} failed: ArithmeticError: the loss is not a number\n{to_grid(plan)}" in failed.stderr
    assert other.exit_code == 1
    assert f"RunError: pipeline rank {1 - faulty_rank}, step" in other.stderr
    assert "failed: RuntimeError" in other.stderr  # the connection closed, wherever it had got to
    assert to_grid(plan) in other.stderr


def test_a_rank_that_has_all_it_needs_is_not_disturbed_by_another_ranks_error(tmp_path):
    ended = run_until_exit(2, tmp_path, run_with_fault, two_ranks(), 0, "B2", fail)
    assert [rank.exit_code for rank in ended] == [1, 0]


def test_an_error_on_the_last_of_four_ranks_ends_all(tmp_path):
    plan = planned((41, 22, 3, 1, 6), (1,) * 4, slices=3)
    ended = run_until_exit(4, tmp_path, run_with_fault, plan, 3, "F0", fail)
    assert [rank.exit_code for rank in ended] == [1] * 4
    for rank, end in enumerate(ended):
        assert f"RunError: pipeline rank {rank}, step" in end.stderr


@pytest.mark.parametrize(
    ("faulty_rank", "action", "message"),
    [
        (0, "F1", "action 1F1 has not finished after 4 s (--epp-wait-limit-seconds), waiting for 0F1 of rank 0"),
        (1, "B1", "action 0B1 has not finished after 4 s (--epp-wait-limit-seconds), waiting for 1B1 of rank 1"),
    ],
)
def test_a_rank_that_waits_too_long_says_for_what_and_ends(tmp_path, faulty_rank, action, message):
    plan = two_ranks()
    other = 1 - faulty_rank
    ended = run_until_exit(2, tmp_path, run_with_fault, plan, faulty_rank, action, hang, LIMIT_S, wait_for=[other])
    assert ended[other].exit_code == EXIT_CODE
    assert f"pipeline rank {other}, step" in ended[other].stderr
    assert message in ended[other].stderr
    assert to_grid(plan) in ended[other].stderr
    assert "executor.py" in ended[other].stderr  # where the threads stand
    assert ended[faulty_rank].exit_code is None


def test_a_rank_whose_messages_nobody_takes_says_so_and_ends(tmp_path):
    plan = by_hand(["0F0 0F1 0F2", "1F0 1F1 1F2"], SLICED_THEN_WHOLE, forward_only=True)
    ended = run_until_exit(2, tmp_path, run_with_fault, plan, 1, "F0", hang, LIMIT_S, wait_for=[0])
    assert ended[0].exit_code == EXIT_CODE
    assert "pipeline rank 0, step 6, the end of the plan has not finished after 4 s" in ended[0].stderr
    assert "waiting for other ranks to take its messages" in ended[0].stderr


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as job:
        yield job


def test_ranks_with_equal_plans_agree(ranks):
    assert ranks.run(agree_on, [two_ranks(), two_ranks()]) == [None, None]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda p: replace(p, ranks=p.ranks[::-1]), "pipeline rank 0, action 0 is 0F0 (1.0 us) or 1F0 (1.0 us)"),
        (
            lambda p: replace(p, ranks=(p.ranks[0], tuple(s._replace(time_us=2.0) for s in p.ranks[1]))),
            "pipeline rank 1, action 0 is 1F0 (1.0 us) or 1F0 (2.0 us)",
        ),
        (lambda p: longer(p, 1), "pipeline rank 1, action 6 is nothing or 1B2 (1.0 us)"),
        (lambda p: replace(p, lengths=(14, 3, 7)), "sequence 2 has 6 or 7 tokens"),
        (lambda p: replace(p, lengths=(14, 3)), "sequence 2 has 6 or None tokens"),
        (lambda p: replace(p, recompute_layers=((1,) * 3,) * 2), "their actions agree, other fields differ"),
    ],
)
def test_ranks_with_different_plans_all_refuse_with_both_digests_and_the_first_difference(ranks, change, difference):
    plans = [two_ranks(), change(two_ranks())]
    errors = ranks.run(agree_on, plans)
    assert errors[0] == errors[1]
    assert f"rank 0 planned {digest(plans[0])[:16]} but rank 1 planned {digest(plans[1])[:16]}" in errors[0][0]
    assert difference in errors[0][0]
    assert "--seed and --epp-* flags" in errors[0][0]
