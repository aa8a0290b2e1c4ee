"""Memory of messages in flight: counted from lowered rows, set aside by planners, proven by `check`."""

from dataclasses import replace

from hypothesis import given

from megatron_epp.cost import on_device
from megatron_epp.cost.library import load_costs
from megatron_epp.plan import UNLIMITED_BYTES, Op, check, lower, simulate
from megatron_epp.plan.communicators import Direction
from megatron_epp.plan.message_slots import message_peaks, slots_of
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Problem, plan
from megatron_epp.planner.candidates import Candidates
from megatron_epp.planner.message_room import message_room
from tests.support.plan.planner_cases import web_lengths
from tests.support.plan.random_plans import sound_plans


def sized(made, *sizes):
    return replace(made, messages=replace(made.messages, num_bytes=sizes))


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


def costs_of(num_stages):
    return on_device(load_costs("llama3-8b-h100").costs([32 // num_stages] * num_stages))


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
