"""Lowering, run by two small model machines: one with buffered sends and blocking receives, one where both sides must meet."""

from collections import defaultdict, deque

import pytest
from hypothesis import given
from schedule_plans import EXAMPLES, looped, make_plan, one_f_one_b, v_shape, whole, with_rows
from schedule_random import sound_plans

from megatron_epp.schedule import Action, Op, PlanError, from_grid, lower, simulate

SENDS = {Op.SEND_F: (1, Op.RECV_F), Op.SEND_B: (-1, Op.RECV_B)}
RECEIVES = {Op.RECV_F: (-1, Op.SEND_F), Op.RECV_B: (1, Op.SEND_B)}


class Stuck(Exception):
    """A machine that cannot go on, or hands a rank the wrong message."""


def link_of(plan, rank, action):
    """(source, destination, direction) of a send or receive, and what the other side calls it."""
    step, other = (SENDS | RECEIVES)[action.op]
    peer = plan.placement[action.stage + step]
    ends = (rank, peer) if action.op in SENDS else (peer, rank)
    return (*ends, action.op.value[-1]), Action(other, action.stage + step, action.chunk)


def run_buffered(plan, rows):
    """Sends return at once; a receive blocks until the next message of its link is there."""
    links, at = defaultdict(deque), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.op in SENDS:
                    link, partner = link_of(plan, rank, action)
                    links[link].append(partner)
                elif action.op in RECEIVES:
                    link, _ = link_of(plan, rank, action)
                    if not links[link]:
                        break
                    if (message := links[link].popleft()) != action:
                        raise Stuck(f"rank {rank} expects {action} and gets {message}")
                at[rank] += 1
                moved = True
    if any(position < len(row) for position, row in zip(at, rows, strict=True)) or any(links.values()):
        raise Stuck(f"ranks stopped at {at}")


def run_rendezvous(plan, rows):
    """Sends and receives are posted, one communicator per link; the heads of both sides must meet, in order.

    A compute action waits until the messages it uses have arrived.
    """
    posted, arrived, at = defaultdict(lambda: (deque(), deque())), set(), [0] * len(rows)
    received = [{a for a in row if a.op in RECEIVES} for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.op in SENDS or action.op in RECEIVES:
                    link, partner = link_of(plan, rank, action)
                    posted[link][action.op in RECEIVES].append(partner if action.op in SENDS else action)
                else:
                    inputs = {a for a in received[rank] if (a.op.value[-1], a.stage, a.chunk) == action}
                    if not inputs <= arrived:
                        break
                at[rank] += 1
                moved = True
        for sent, wanted in posted.values():
            while sent and wanted:
                if (message := sent.popleft()) != wanted.popleft():
                    raise Stuck(f"{message} meets another receive")
                arrived.add(message)
                moved = True
    if any(position < len(row) for position, row in zip(at, rows, strict=True)) or any(any(q) for q in posted.values()):
        raise Stuck(f"ranks stopped at {at}")


def text(rows):
    return [" ".join(map(str, row)) for row in rows]


def test_receives_stand_one_action_ahead_when_that_helps_and_sends_right_behind():
    """1RECV_F1 travels beside 1B0; 1RECV_F2 would not, as 0F2 ends (at 72) after 1B1 (at 71)."""
    assert text(lower(one_f_one_b())) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
    ]


def test_stages_of_one_rank_exchange_no_messages():
    rows = lower(v_shape())
    assert not [a for row in rows for a in row if str(a) in ("1SEND_F0", "2RECV_F0", "2SEND_B0", "1RECV_B0")]
    alone = make_plan(["0F0 1F0 1B0 0B0"], whole(2), placement=(0, 0))
    assert lower(alone) == (alone.actions(0),)


def test_a_receive_stays_behind_the_action_its_message_depends_on():
    """Rank 1 cannot send the gradient before it has 0F1: a receive ahead of 0F1 would hang a machine whose receives block."""
    plan = make_plan(["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"], whole(1, 1))
    row = text(lower(plan))[0]
    assert row.index("0F1") < row.index("0RECV_B1") < row.index("0B1")
    early = from_grid("rank 0 | 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0RECV_B0 0B1 0B0")[0]
    with pytest.raises(Stuck):
        run_buffered(plan, (early, lower(plan)[1]))


def test_receives_follow_the_sends_where_boundaries_share_a_link():
    """Rank 0 sends 0F0, 0F1, 2F0; rank 1 runs stage 3 of chunk 0 first, so it receives 0F1 early."""
    plan = make_plan(["0F0 0F1 2F0 2F1", "1F0 3F0 1F1 3F1"], whole(1, 1), placement=(0, 1, 0, 1), forward_only=True)
    rows = lower(plan)
    assert [str(a) for a in rows[1] if a.op is Op.RECV_F] == ["1RECV_F0", "1RECV_F1", "3RECV_F0", "3RECV_F1"]
    run_buffered(plan, rows)
    run_rendezvous(plan, rows)


def test_a_deadlock_is_not_lowered():
    plan = with_rows(looped(), "2F0 0F0 0F1 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
    with pytest.raises(PlanError, match=r"the order deadlocks: rank 0 at position 0: 2F0 waits for 1F0 \(rank 1, position 0\)"):
        lower(plan)


@pytest.mark.parametrize("machine", [run_buffered, run_rendezvous])
def test_the_machines_notice_crossed_and_missing_messages(machine):
    plan = make_plan(["0F0 0F1", "1F0 1F1"], whole(1, 1), forward_only=True)
    rows = [list(row) for row in lower(plan)]
    machine(plan, rows)
    i, j = (rows[1].index(Action.parse(word)) for word in ("1RECV_F0", "1RECV_F1"))
    rows[1][i], rows[1][j] = rows[1][j], rows[1][i]
    with pytest.raises(Stuck):
        machine(plan, rows)
    with pytest.raises(Stuck):
        machine(plan, [rows[0], [a for a in rows[1] if a.op is Op.F]])


def assert_well_lowered(plan):
    rows = lower(plan)
    for rank, row in enumerate(rows):
        assert tuple(a for a in row if a.op in (Op.F, Op.B, Op.W)) == plan.actions(rank)
        place = {action: i for i, action in enumerate(row)}
        assert len(place) == len(row)
        for action in row:
            if action.op in SENDS:
                producer = Action(Op(action.op.value[-1]), action.stage, action.chunk)
                assert place[action] == place[producer] + 1
            elif action.op in RECEIVES:
                assert place[action] < place[Action(Op(action.op.value[-1]), action.stage, action.chunk)]
    sent, taken = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(rows):
        for action in row:
            if action.op in SENDS:
                link, partner = link_of(plan, rank, action)
                sent[link].append(partner)
            elif action.op in RECEIVES:
                taken[link_of(plan, rank, action)[0]].append(action)
    assert sent == taken
    assert sum(map(len, sent.values())) == len(simulate(plan).messages())
    run_buffered(plan, rows)
    run_rendezvous(plan, rows)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run_on_both_machines(name):
    assert_well_lowered(EXAMPLES[name]())


@given(sound_plans())
def test_every_sound_plan_runs_on_both_machines(plan):
    assert_well_lowered(plan)


@given(sound_plans(crossed=True))
def test_even_messages_that_overtake_each_other_are_brought_into_order(plan):
    assert_well_lowered(plan)
