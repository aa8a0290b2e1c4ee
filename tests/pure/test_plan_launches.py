"""Lowered plans never hang, however devices queue launches and wherever hosts wait; what can hang is found and named."""

import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, Op, check, check_lockstep, lower, to_grid, to_json
from megatron_epp.plan.check.deadlock import blocked, check_launches
from megatron_epp.plan.launches import Launches
from tests.support.plan.queue_machine import stuck, stuck_together
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import looped, make_plan, one_f_one_b, whole, with_step

COMMUNICATION = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Op.REDUCE)
MACHINES = [(1, 0.0), (1, 0.1), (1, 1.0), (2, 0.1), (8, 0.0), (32, 0.1)]


def run(plan, rows, queues=1, waits=0.0, seed=0):
    return stuck(to_json(plan), to_grid(rows), queues, waits, seed)


@given(sound_plans(crossed=True), st.sampled_from(MACHINES), st.integers(0, 99))
def test_every_plan_ends_on_every_machine(plan, machine, seed):
    rows = lower(plan)
    assert blocked([rows]) == []
    assert run(plan, rows, *machine, seed) == []


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
    """Rows whose receives stand right before the actions that use them."""
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
    rows = late_receives(lower(one_f_one_b()))
    (fault,) = check_launches([rows])
    assert str(fault) == (
        "rank 0 0SEND_F1: the launches can hang: rank 0 0SEND_F1 (launch 3) waits for rank 1 1SEND_B0 "
        "(launch 3) waits for rank 0 0SEND_F1 (launch 3)"
    )


def test_a_message_without_its_other_side_is_named():
    rows = [[a for a in row if str(a) != "1RECV_F1"] for row in lower(one_f_one_b())]
    assert "rank 0 0SEND_F1 (launch 3) waits for a partner that is in no row" in str(*check_launches([rows]))


def test_check_refuses_a_plan_whose_rows_hang(monkeypatch):
    checking = sys.modules["megatron_epp.plan.check"]
    monkeypatch.setattr(checking, "issue_order", lambda plan, *_: Launches.of(late_receives(lower(plan))))
    assert "can hang" in str(check(one_f_one_b())[0])


def test_replicas_that_reduce_in_different_orders_may_wait_for_each_other():
    rows = lower(looped())
    swapped = [list(row) for row in rows]
    first, second = (i for i, a in enumerate(swapped[0]) if a.op is Op.REDUCE)
    swapped[0][first], swapped[0][second] = swapped[0][second], swapped[0][first]
    assert blocked([rows, rows]) == []
    assert {place.replica for place in blocked([rows, swapped])} == {0, 1}


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
    """One short sequence, forward and backward, over the same placement."""
    stages = range(plan.num_stages)
    rows = [[f"{s}F0" for s in stages if plan.placement[s] == rank] for rank in range(plan.num_ranks)]
    if not plan.forward_only:
        for rank, row in enumerate(rows):
            row += [f"{s}B0" for s in reversed(stages) if plan.placement[s] == rank]
    return make_plan([" ".join(row) for row in rows], whole(1), placement=plan.placement, forward_only=plan.forward_only)


def test_lockstep_plans_that_receive_at_different_exchanges_may_wait_for_each_other():
    """Both replicas run the same exchanges; in the second, gradients are received two backwards later."""
    plan = make_plan(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], whole(1, 1))
    rows = lower(plan)
    late = [list(row) for row in rows]
    late[0].remove(receive := Action(Op.RECV_B, 0, 0))
    late[0].insert(late[0].index(Action(Op.B, 0, 0)), receive)
    early = [list(row) for row in rows]
    early[0].remove(receive)
    early[0].insert(1, receive)
    assert blocked([rows, rows], lockstep=True) == []
    assert blocked([late, early], lockstep=True)
    slow = [with_step(plan, step, time_us=50.0) for step in ("0F1", "1F0")]  # messages become due in another order
    assert [check_lockstep([one, one]) for one in slow] == [[], []]
    (fault,) = check_lockstep(slow)
    assert "the launches can hang: replica " in fault.reason
