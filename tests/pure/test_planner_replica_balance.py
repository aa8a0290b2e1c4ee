"""Sharing a batch out over replicas: every sequence once, plans of about equal time, and what no division can do."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.problem import by_count, connected, imbalance
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.estimate import estimate_us
from megatron_epp.planner.service.replica_balance import _Exchange, divide, longest_first
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512)
COSTS = analytic_costs(SHAPE, CPU, [2, 2])


def problem(lengths, cap_bytes=UNLIMITED_BYTES):
    return Problem(lengths=tuple(lengths), placement=(0, 1), cap_bytes=(cap_bytes,) * 2)


def planned_us(problems):
    return plan(problems[0], COSTS).predicted.makespan_us


def alone(replicas):
    return tuple((replica,) for replica in range(replicas))


def divided(lengths, replicas, **options):
    return divide(problem(lengths), COSTS, alone(replicas), planned_us, **options)


def work_of(problems):
    """A stand-in for plans: attention dominates, and the slowest of a team decides."""
    return max(sum(length * length + 50 * length for length in one.lengths) for one in problems)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_in_one_share_and_no_share_is_empty(lengths, replicas):
    if len(lengths) < replicas:
        with pytest.raises(PlanError, match="raise global_batch_size to"):
            divide(problem(lengths), COSTS, alone(replicas), work_of)
        return
    division = divide(problem(lengths), COSTS, alone(replicas), work_of)
    assert sorted(at for share in division.shares for at in share) == list(range(len(lengths)))
    assert all(share == tuple(sorted(share)) and share for share in division.shares)
    assert division == divide(problem(lengths), COSTS, alone(replicas), work_of)


@pytest.mark.slow
@given(st.lists(st.integers(1, 3000), min_size=4, max_size=12), st.integers(2, 3))
@settings(max_examples=8, deadline=None)
def test_exchanges_never_make_the_slowest_plan_slower(lengths, replicas):
    without, having = (divided(lengths, replicas, tries=tries) for tries in (0, 4))
    assert max(having.makespan_us) <= max(without.makespan_us)


def test_shares_take_equal_time_not_equal_counts():
    lengths = (4000, 2000, 2000, *(200,) * 61)
    by_time = divided(lengths, 2)
    times_us = [planned_us([problem(lengths[at] for at in by_count(64, r, 2))]) for r in range(2)]
    assert imbalance(by_time.makespan_us) < 0.02 < imbalance(times_us)
    assert len(by_time.shares[0]) != len(by_time.shares[1])


def test_a_sequence_longer_than_all_the_rest_has_a_replica_of_its_own():
    division = divided((9000, *(50,) * 15), 4)
    alone_us = planned_us([problem((9000,))])
    assert (0,) in division.shares
    assert max(division.makespan_us) == alone_us


def test_where_work_misjudges_a_plan_exchanges_go_by_the_plan():
    """Every sequence takes an hour, whatever its length."""
    division = divide(problem((4000, *(10,) * 19)), COSTS, alone(2), lambda problems: 3.6e9 * len(problems[0].lengths))
    assert [len(share) for share in division.shares] == [10, 10]


@pytest.mark.parametrize("replicas", [2, 3])
def test_longest_first_is_within_a_third_of_the_best_division(replicas):
    """Graham's bound, against all divisions of eight sequences."""
    work_us, divisions = [7.0, 7.0, 6.0, 5.0, 5.0, 4.0, 4.0, 4.0], product(range(replicas), repeat=8)
    best = min(max(sum(w for w, to in zip(work_us, where, strict=True) if to == r) for r in (0, 1, 2)) for where in divisions)
    worst = max(sum(work_us[at] for at in share) for share in longest_first(work_us, replicas))
    assert best <= worst <= (4 / 3 - 1 / (3 * replicas)) * best


@given(st.lists(st.integers(1, 5000), min_size=6, max_size=30))
@settings(max_examples=40, deadline=None)
def test_replicas_of_a_team_take_as_long_as_its_slowest(lengths):
    lockstep_groups = ((0, 1), (2, 3))
    division = divide(problem(lengths), COSTS, lockstep_groups, work_of)
    assert sorted(at for share in division.shares for at in share) == list(range(len(lengths)))
    for lockstep_group in lockstep_groups:
        shares = [problem(lengths[at] for at in division.shares[replica]) for replica in lockstep_group]
        assert {division.makespan_us[replica] for replica in lockstep_group} == {work_of(shares)}


@pytest.mark.parametrize(
    ("sharing", "lockstep_groups"),
    [
        ([{0}, {1}, {2}], ((0,), (1,), (2,))),
        ([{0, 1}, {0, 1}, {2, 3}, {2, 3}], ((0, 1), (2, 3))),
        ([{0, 2}, {1, 3}], ((0, 2), (1, 3))),
        ([{0, 1}, {2, 3}, {1, 2}], ((0, 1, 2, 3),)),
    ],
)
def test_replicas_that_share_experts_are_a_team(sharing, lockstep_groups):
    assert connected(sharing) == lockstep_groups


def test_long_sequences_go_to_the_same_team():
    division = divide(problem((4000, 3900, *(150,) * 60)), COSTS, ((0, 1), (2, 3)), work_of)
    assert {0, 1} <= {*division.shares[0], *division.shares[1]}


def test_a_share_that_fits_no_cap_gives_away_what_another_replica_has_room_for():
    work_us, most = [5.0, 5.0, 5.0, 1.0, 1.0, 1.0], 12.0

    def of_plan(shares):
        time_us = max(sum(work_us[at] for at in share) for share in shares)
        return time_us if time_us <= most else math.inf

    shares, times_us = _Exchange(alone(2), work_us, of_plan).run([(0, 1, 2), (3, 4, 5)], 16, 0.0)
    assert sorted(at for share in shares for at in share) == list(range(len(work_us)))
    assert max(times_us) <= most


def test_an_estimate_is_close_to_the_plan():
    for lengths in ((900, 700, 30, 400, 410, 20, 77, 500, 12), (4000, *(50,) * 30), (300,) * 16):
        planned = plan(problem(lengths), COSTS).predicted.makespan_us
        assert planned <= estimate_us(problem(lengths), COSTS, Options()) * (1 + 1e-9) <= 1.2 * planned


def test_an_estimate_counts_the_recompute_that_the_caps_force():
    lengths = (2000, 1500, *(100,) * 20)
    free = plan(problem(lengths), COSTS)
    cap = free.static_bytes[0] + (max(free.predicted.peak_bytes) - free.static_bytes[0]) * 2 // 5
    roomy, tight = (estimate_us(problem(lengths, most), COSTS, Options()) for most in (UNLIMITED_BYTES, cap))
    assert tight > roomy
    with pytest.raises(InfeasibleError):
        estimate_us(problem(lengths, 1000), COSTS, Options())


def test_replicas_plan_their_shares_of_one_division():
    """Each in a process of its own."""
    lengths = (900, 30, 400, 410, 20, 77, 500, 12)
    planners = [BackgroundPlanner(COSTS, Options(), replica, alone(2)) for replica in range(2)]
    first, second = packed = [one for planner in planners for one in planner.plan(problem(lengths))]
    for planner in planners:
        planner.process.close()
    assert first.division == second.division
    assert sorted(first.share + second.share) == list(range(8))
    for one in packed:
        assert one.plan().lengths == tuple(lengths[at] for at in one.share)
