"""Memory of messages in flight: counted from lowered rows, set aside by planners, proven by `check`."""

from dataclasses import replace

import pytest
from hypothesis import given

from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Op, check, lower, simulate
from megatron_epp.plan.communicators import Direction
from megatron_epp.plan.message_slots import message_peaks, slots_of
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.candidates import Candidates
from megatron_epp.planner.message_room import message_room
from tests.support.plan.launch_campaign import costs_of
from tests.support.plan.planner_cases import web_lengths
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import one_f_one_b, v_shape
from tests.support.seeds import some_by_default


def sized(made, *sizes):
    return replace(made, messages=replace(made.messages, num_bytes=sizes))


def test_a_payload_is_held_to_its_send_a_gradient_while_it_is_used_and_slots_throughout():
    """Rank 0 has two slots for activations and, as 0B0 comes before 1B1 ends, one for gradients; in 0B0, the gradient of chunk
    0 is held next to them. So is on rank 1 the payload of 1B0.
    """
    made = sized(one_f_one_b(), 100, 10, 1)
    rows = lower(made)
    assert slots_of(made, 0, rows[0]) == {Direction(0, 1, False): 2, Direction(1, 0, True): 1}
    assert slots_of(made, 1, rows[1]) == {Direction(0, 1, False): 2, Direction(1, 0, True): 2}
    assert message_peaks(made, rows) == (300 + 100, 400 + 100)


def test_what_a_rank_hands_to_its_own_next_stage_counts_until_that_takes_it():
    made = sized(v_shape(), 1, 0)
    rows = lower(made)
    assert [str(a) for a in rows[1] if a.chunk == 0][:4] == ["1RECV_F0", "1F0", "2F0", "2SEND_F0"]
    held = sum(slots_of(made, 1, rows[1]).values())
    assert message_peaks(made, rows)[1] == held + 2, "2B0 uses a gradient and makes one, which 1B0 takes over"


@given(sound_plans())
def test_the_peak_is_what_a_ledger_of_messages_finds(made):
    """Each message by name: taken and given back where the rows say; in the end none is left."""
    made = sized(made, *range(1, len(made.chunks) + 1))
    rows = lower(made)
    for rank, (row, peak) in enumerate(zip(rows, message_peaks(made, rows), strict=True)):
        slots, most = ledger(made, rank, row)
        assert slots_of(made, rank, row) == slots
        assert peak == sum(slots.values()) * len(made.chunks) + most


def ledger(made, rank, row):
    """Slots by way, and the most bytes outside of slots."""
    live, posted, slots, most = {}, {}, {}, 0

    def is_here(stage):
        return made.placement[stage] == rank

    for op, stage, chunk in row:
        came = (stage - 1 if op is Op.F else stage + 1) if op in (Op.F, Op.B) else None
        if came is not None and 0 <= came < made.num_stages:
            if is_here(came):
                if op is Op.F:
                    del live[op, stage, chunk]
            else:
                posted[made.placement[came], rank, op is Op.B].remove((stage, chunk))
                if op is Op.B:
                    live[op, stage, chunk] = True
        goes = (stage + 1 if op is Op.F else stage - 1) if op in (Op.F, Op.B) else None
        if goes is not None and 0 <= goes < made.num_stages:
            live[op, goes, chunk] = True
        if op in (Op.RECV_F, Op.RECV_B):
            way = Direction(made.placement[stage + (-1 if op is Op.RECV_F else 1)], rank, op is Op.RECV_B)
            posted.setdefault(way, []).append((stage, chunk))
            slots[way] = max(slots.get(way, 0), len(posted[way]))
        most = max(most, sum(made.messages.num_bytes[chunk] for _, _, chunk in live))
        if op in (Op.SEND_F, Op.SEND_B):
            to = stage + (1 if op is Op.SEND_F else -1)
            way = Direction(rank, made.placement[to], op is Op.SEND_B)
            slots[way] = min(2, slots.get(way, 0) + 1)
            del live[Op.F if op is Op.SEND_F else Op.B, to, chunk]
        if op is Op.B:
            live.pop((Op.B, stage, chunk), None)
    assert not live
    assert not any(posted.values())
    return slots, most


def problem(placement, lengths, cap=UNLIMITED_BYTES):
    return Problem(lengths, placement.rank_of, (cap,) * placement.num_ranks)


def test_placements_may_have_other_messages_in_flight_than_is_guessed():
    placement = Placement("looped", 4, 4)
    asked = problem(placement, (4096,) * 24)
    made = plan(asked, costs_of(16))
    guess = message_room(asked, made.messages.num_bytes)
    assert max(made.message_bytes) > 0
    assert made.message_bytes != guess
    assert made.message_bytes == message_peaks(made, lower(made))
    assert check(made) == []
    few = tuple(size - 1 for size in made.message_bytes)
    static = tuple(size - 1 for size in made.static_bytes)
    short = replace(made, message_bytes=few, static_bytes=static)
    assert "are set aside for them" in str(check(short)[0])


def test_where_messages_need_more_room_the_candidates_of_the_table_are_made_again_with_it(monkeypatch):
    """Orders of several stages per rank say how many messages are in flight only when they are known."""
    rooms = list[tuple[int, ...]]()
    set_room = Candidates.set_room
    monkeypatch.setattr(
        Candidates, "set_room", lambda self, table, needed: rooms.append(needed) or set_room(self, table, needed)
    )
    placement, costs = Placement("looped", 4, 2), costs_of(8)
    lengths = web_lengths(30, 1, longest=16384)
    free = plan(problem(placement, lengths), costs)
    cap = int(0.7 * max(free.static_bytes) + 0.3 * max(free.predicted.peak_bytes))
    made = plan(problem(placement, lengths, cap), costs)
    assert check(made) == []
    assert rooms
    assert all(peak <= cap for peak in simulate(made).peak_bytes)


@some_by_default(("kind", "stages"), [("v", 2), ("looped", 2), ("looped", 1)], 1)
def test_the_least_cap_that_an_error_names_has_room_for_messages(kind, stages):
    placement = Placement(kind, 4, stages)
    lengths = (30_000, 9000, 700, 3000)
    free = plan(problem(placement, lengths), costs_of(4 * stages))
    with pytest.raises(InfeasibleError) as error:
        plan(problem(placement, lengths, max(free.static_bytes)), costs_of(4 * stages), Options())
    made = plan(problem(placement, lengths, error.value.least_cap_bytes), costs_of(4 * stages))
    assert max(simulate(made).peak_bytes) <= error.value.least_cap_bytes


@some_by_default(
    ("kind", "ranks", "lengths", "options"),
    [
        ("v", 2, (10667, 7067, 12858), Options(split_weight=True)),
        ("looped", 2, (13563, 8148, 6102), Options(recompute=0, split_weight=True)),
        ("looped", 4, (11449, 5409, 3322, 7968, 6222, 4939, 1395), Options(recompute=0)),
        ("looped", 4, (1425, 6939, 11789, 8273, 1101, 2321, 14096, 2304), Options()),
    ],
    2,
)
def test_a_cap_is_named_for_a_search_that_knows_of_no_other(kind, ranks, lengths, options):
    placement, costs = Placement(kind, ranks, 2), costs_of(2 * ranks)
    with pytest.raises(InfeasibleError) as error:
        plan(problem(placement, lengths, 1), costs, options)
    assert check(plan(problem(placement, lengths, error.value.least_cap_bytes), costs, options)) == []
