"""Lowering: where messages, reductions and copies stand, what a rank then holds, and that nothing hangs on hardware queues."""

import sys
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp import planner
from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.launches import Launches
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked, check_launches
from megatron_epp.plan.proof.lockstep import check_lockstep
from megatron_epp.plan.serialize import to_json
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.plan.queue_machine import stuck, stuck_together
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import looped, make_plan, one_f_one_b, whole, with_rows, with_step

SENDS = {Op.SEND_F: (1, Op.RECV_F), Op.SEND_B: (-1, Op.RECV_B)}
RECEIVES = {Op.RECV_F: (-1, Op.SEND_F), Op.RECV_B: (1, Op.SEND_B)}


def link_of(plan, rank, action):
    """(source, destination, direction) of a send or receive, and what the other side calls it."""
    step, other = (SENDS | RECEIVES)[action.op]
    peer = plan.placement[action.stage + step]
    ends = (rank, peer) if action.op in SENDS else (peer, rank)
    return (*ends, action.op[-1]), Action(other, action.stage + step, action.chunk)


def text(rows):
    return [" ".join(map(str, row)) for row in rows]


def test_of_two_messages_of_a_link_made_during_one_action_the_second_is_received_behind_it():
    """Ahead of it, it would keep the action waiting for the first: both are on one stream."""
    plan = make_plan(["0F0 0F1 0F2", "1F0 1F1 1F2"], whole(1, 1, 1), forward_only=True)
    for step, time_us in (("0F0", 10.0), ("0F1", 4.0), ("0F2", 4.0), ("1F0", 20.0), ("1F1", 1.0), ("1F2", 1.0)):
        plan = with_step(plan, step, time_us=time_us)
    assert text(lower(plan))[1] == "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2"


def test_a_stage_reduces_when_its_last_gradient_is_on_its_way_and_all_later_stages_reduce():
    """Stage 1 has its last weight gradient behind all of stage 0's actions: stage 0, on another rank, waits for it."""
    plan = with_step(make_plan(["0F0 0B0", "1F0 1B0 1W0"], whole(1)), "1W0", time_us=50.0)
    assert text(lower(plan)) == ["0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE0", "1RECV_F0 1F0 1B0 1SEND_B0 1W0 1REDUCE0"]


def test_a_reduction_is_launched_ahead_of_compute_that_starts_behind_its_gradients():
    plan = make_plan(["0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"], whole(4, 4), placement=(0, 0, 0))
    assert text(lower(plan)) == ["0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 2REDUCE1 1B0 1B1 1REDUCE1 0B0 0B1 0REDUCE1"]


def test_a_deadlock_is_not_lowered():
    plan = with_rows(looped(), "2F0 0F0 0F1 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
    with pytest.raises(PlanError, match="the order deadlocks"):
        lower(plan)


@given(sound_plans(crossed=True))
def test_even_messages_that_overlap_each_other_are_brought_into_order(plan):
    rows = lower(plan)
    for rank, row in enumerate(rows):
        assert tuple(a for a in row if a.op in (Op.F, Op.B, Op.W)) == plan.actions(rank)
        place = {action: i for i, action in enumerate(row)}
        assert len(place) == len(row)
        for action in row:
            own = Action(Op(action.op[-1]), action.stage, action.chunk) if action.op in SENDS | RECEIVES else None
            if action.op in SENDS:
                between = row[place[own] + 1 : place[action]]
                assert all(other.op in SENDS | RECEIVES or other.op is Op.REDUCE for other in between)
            elif action.op in RECEIVES:
                assert place[action] < place[own]
            elif action.op is Op.REDUCE:
                gives = [i for a, i in place.items() if a.stage == action.stage and a.op in (Op.B, Op.W, Op.SEND_B)]
                assert max(gives) < place[action]
        reduced = [a.stage for a in row if a.op is Op.REDUCE]
        assert reduced == sorted(reduced, reverse=True)
        assert plan.forward_only or sorted(reduced) == [s for s, on in enumerate(plan.placement) if on == rank]
    sent, taken = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(rows):
        for action in row:
            if action.op in SENDS:
                link, partner = link_of(plan, rank, action)
                sent[link].append(partner)
            elif action.op in RECEIVES:
                taken[link_of(plan, rank, action)[0]].append(action)
    assert (sent, sum(map(len, sent.values()))) == (taken, len(simulate(plan).messages()))


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_a_shards_last_weight_gradient_precedes_the_reduction_of_its_ranks_first_stage(placement):
    shape = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=50_000)
    costs = analytic_profile(shape, CPU).costs([4 // len(placement)] * len(placement), vocabulary_shares=(0.5, 0.5))
    plan = planner.plan(Problem((900, 500, 200, 120), placement, (UNLIMITED_BYTES,) * 2), costs, Options(slices=2))
    behind = 0
    for rank, row in enumerate(lower(plan)):
        first = placement.index(rank)
        ends = [i for i, action in enumerate(row) if action.op is Op.T]
        (reduced,) = (i for i, action in enumerate(row) if action.op is Op.REDUCE and action.stage == first)
        assert reduced > max(ends)
        behind += max(ends) > max(i for i, action in enumerate(row) if action.op is Op.B and action.stage == first)
        assert {action.stage for action in row if action.op is Op.REDUCE} == {s for s, on in enumerate(placement) if on == rank}
    assert behind > 0


COPIES = (Op.O, Op.FREE, Op.L)


def most_held(plan, rank, row):
    """Most bytes live when the row's actions run one after the other, the static ones included."""
    steps = {step.action: step for step in (*plan.ranks[rank], *(plan.copies[rank] if plan.copies else ()))}
    live = most = plan.static_bytes[rank]
    for action in row:
        if action in steps:
            live += steps[action].alloc_bytes
            most = max(most, live)
        if action.op is Op.FREE:
            live -= steps[action._replace(op=Op.O)].free_bytes
        elif action in steps and action.op is not Op.O:
            live -= steps[action].free_bytes
    assert live == plan.static_bytes[rank]
    return most


@given(sound_plans(shared=True))
def test_copies_stand_in_their_order_between_forward_and_backward(plan):
    for rank, row in enumerate(lower(plan)):
        place = {action: at for at, action in enumerate(row)}
        copies = [step.action for step in plan.copies[rank]] if plan.copies else []
        away = [action for action in copies if action.op is Op.O]
        expected = {*copies, *(action._replace(op=Op.FREE) for action in away)}
        assert {action for action in row if action.op in COPIES} == expected
        for _, stage, chunk in away:
            order = [place[Action(op, stage, chunk)] for op in (Op.F, Op.O, Op.FREE, Op.L, Op.B)]
            assert order == sorted(order)


@given(sound_plans(shared=True))
def test_a_rank_holds_in_the_order_of_issue_what_it_holds_in_the_simulation(plan):
    peaks = simulate(plan).peak_bytes
    for rank, row in enumerate(lower(plan)):
        assert most_held(plan, rank, row) == peaks[rank]


@given(sound_plans(shared=True, min_time=1))
def test_copies_are_issued_before_the_action_they_start_beside_and_freed_behind_the_one_they_end_beside(plan):
    line = simulate(plan)
    for rank, row in enumerate(lower(plan)):
        place = {action: at for at, action in enumerate(row)}
        for step, start_us, end_us in zip(plan.ranks[rank], line.start_us[rank], line.end_us[rank], strict=True):
            here, freed, waits = place[step.action], {}, False
            for (action, *_), *times_us in zip(
                plan.copies[rank], line.copy_start_us[rank], line.copy_end_us[rank], strict=True
            ):
                _, stage, chunk = action
                if action.op is Op.O:
                    freed[stage, chunk] = times_us[1] <= start_us
                    assert (place[Action(Op.FREE, stage, chunk)] < here) == freed[stage, chunk]
                waits = waits or (action.op is Op.L and not freed[stage, chunk])  # and all behind it with it
                assert (place[action] < here) == (times_us[0] < end_us and not waits)


COMMUNICATION = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Op.REDUCE)
MACHINES = [(1, 0.0), (1, 0.1), (1, 1.0), (2, 0.1), (8, 0.0), (32, 0.1)]


def run(plan, rows, queues=1, waits=0.0, seed=0):
    return stuck(to_json(plan), to_grid(rows), queues, waits, seed)


@given(sound_plans(crossed=True), st.sampled_from(MACHINES), st.integers(0, 99))
def test_every_plan_ends_on_every_machine(plan, machine, seed):
    rows = lower(plan)
    assert (blocked([rows]), run(plan, rows, *machine, seed)) == ([], [])


@given(sound_plans(), st.randoms(use_true_random=False))
def test_the_proof_agrees_with_a_machine_that_waits_before_each_launch_and_covers_all_others(plan, rng):
    """Rows whose messages stand elsewhere: what the proof lets pass ends on all machines, what it refuses hangs on that one."""
    rows = [list(row) for row in lower(plan)]
    for _ in range(rng.randint(1, 4)):
        row = rows[rng.randrange(len(rows))]
        positions = [i for i, a in enumerate(row) if a.op in COMMUNICATION]
        if positions:
            action = row.pop(rng.choice(positions))
            low, high = reach(row, action)
            row.insert(rng.randint(low, high), action)
    found = blocked([rows])
    assert bool(found) == bool(run(plan, rows, 1, 1.0))
    if not found:
        for queues, waits in MACHINES:
            assert run(plan, rows, queues, waits, rng.randint(0, 99)) == []


def reach(row, action):
    """Between which positions a send or receive may stand: behind its producer, ahead of its consumer."""
    op, stage, chunk = action
    if op is Op.REDUCE:
        return max(i for i, a in enumerate(row) if a.stage == stage) + 1, len(row)
    own = row.index(Action(Op(op[-1]), stage, chunk))
    return (own + 1, len(row)) if op in (Op.SEND_F, Op.SEND_B) else (0, own)


def late_receives(rows):
    late = []
    for row in rows:
        receives = {Action(Op(a.op[-1]), a.stage, a.chunk): a for a in row if a.op in (Op.RECV_F, Op.RECV_B)}
        others = [a for a in row if a.op not in (Op.RECV_F, Op.RECV_B)]
        late.append([each for a in others for each in ((receives[a], a) if a in receives else (a,))])
    return late


def test_receives_posted_right_before_their_use_hang_on_hardware_queues_and_are_refused():
    """How plans were lowered once: the second unmatched send of a stream keeps all behind it in the queue from starting."""
    plan = make_plan(["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"], whole(1, 1, 1, 1))
    rows = late_receives(lower(plan))
    assert run(plan, lower(plan)) == []
    assert run(plan, rows) != []
    assert blocked([rows]) != []


def test_a_cycle_is_named_launch_by_launch():
    (fault,) = check_launches([late_receives(lower(one_f_one_b()))])
    assert str(fault) == (
        "rank 0 0SEND_F1: the launches can hang: rank 0 0SEND_F1 (launch 3) waits for rank 1 1SEND_B0 "
        "(launch 3) waits for rank 0 0SEND_F1 (launch 3)"
    )


def test_a_message_without_its_other_side_is_named():
    rows = [[a for a in row if str(a) != "1RECV_F1"] for row in lower(one_f_one_b())]
    assert "rank 0 0SEND_F1 (launch 3) waits for a partner that is in no row" in str(*check_launches([rows]))


def test_check_refuses_a_plan_whose_rows_hang(monkeypatch):
    checking = sys.modules["megatron_epp.plan.proof"]
    monkeypatch.setattr(checking, "issue_order", lambda plan, *_: Launches.of(late_receives(lower(plan))))
    assert "can hang" in str(check(one_f_one_b())[0])


def test_replicas_that_reduce_in_different_orders_may_wait_for_each_other():
    rows = lower(looped())
    swapped = [list(row) for row in rows]
    first, second = (i for i, a in enumerate(swapped[0]) if a.op is Op.REDUCE)
    swapped[0][first], swapped[0][second] = swapped[0][second], swapped[0][first]
    assert (blocked([rows, rows]), {place.replica for place in blocked([rows, swapped])}) == ([], {0, 1})


@given(sound_plans(), st.integers(0, 99))
def test_replicas_with_plans_of_their_own_never_wait_for_each_others_reductions(plan, seed):
    """The other replica has the same stages, and sequences and times of its own."""
    scale = (seed % 7 + 1) / 3
    other = replace(plan, ranks=tuple(tuple(s._replace(time_us=s.time_us * scale + seed % 3) for s in r) for r in plan.ranks))
    replicas = [plan, other, make_other(plan)]
    rows = [lower(one) for one in replicas]
    assert blocked(rows) == []
    texts = [(to_json(one), to_grid(row)) for one, row in zip(replicas, rows, strict=True)]
    assert stuck_together(texts, False, 1, 0.2, seed) == []


def make_other(plan):
    stages = range(plan.num_stages)
    order = [(s, "F") for s in stages] + [(s, "B") for s in reversed(stages)] * (not plan.forward_only)
    rows = [" ".join(f"{s}{op}0" for s, op in order if plan.placement[s] == rank) for rank in range(plan.num_ranks)]
    return make_plan(rows, whole(1), placement=plan.placement, forward_only=plan.forward_only)


def test_lockstep_plans_that_receive_at_different_exchanges_may_wait_for_each_other():
    """Both replicas run the same exchanges; in the second, gradients are received two backwards later."""
    plan = make_plan(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], whole(1, 1))
    rows = lower(plan)
    receive = Action(Op.RECV_B, 0, 0)
    late, early = ([[action for action in rows[0] if action != receive], rows[1]] for _ in range(2))
    late[0].insert(late[0].index(Action(Op.B, 0, 0)), receive)
    early[0].insert(1, receive)
    assert blocked([rows, rows], lockstep=True) == []
    assert blocked([late, early], lockstep=True)
    slow = [with_step(plan, step, time_us=50.0) for step in ("0F1", "1F0")]  # messages become due in another order
    assert [check_lockstep([one, one]) for one in slow] == [[], []]
    (fault,) = check_lockstep(slow)
    assert "the launches can hang: replica " in fault.reason
