"""Memory besides that of steps: messages in flight, keys, values, what the host has; and its breakdown into items."""

import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.cost import memory as item
from megatron_epp.cost.blocks import StageCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, ModeCosts
from megatron_epp.plan import UNLIMITED_BYTES, Action, KVOffload, Op, Plan, Prediction, Step
from megatron_epp.plan.communicators import Direction
from megatron_epp.plan.kv_offload import HOST_UNIT_BYTES, host_memory, host_peak_bytes, in_units, kv_offload_changes, slices_of
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.message_slots import message_peaks, slots_of
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.candidates import Candidates
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.message_room import message_room
from megatron_epp.tools.formulas import on_device
from megatron_epp.tools.formulas.library import load_costs
from tests.support.plan.campaign import faults_of_breakdown
from tests.support.plan.planner_cases import problem, web_lengths
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import evaluation, faults, make_plan, only_fault, sliced, whole
from tests.support.plan.stages import THREE_LAYERS, stage_of


@given(sound_plans())
def test_the_peak_is_what_a_ledger_of_messages_finds(made):
    """Each message by name: taken and given back where the rows say; in the end none is left."""
    made = replace(made, messages=replace(made.messages, num_bytes=tuple(range(1, len(made.chunks) + 1))))
    rows = lower(made)
    for rank, (row, peak) in enumerate(zip(rows, message_peaks(made, rows), strict=True)):
        slots, most = ledger(made, rank, row)
        assert (slots_of(made, rank, row), peak) == (slots, sum(slots.values()) * len(made.chunks) + most)


def ledger(made, rank, row):
    """Slots by way, and the most bytes outside of slots."""
    live, posted, slots, most = {}, {}, {}, 0

    for op, stage, chunk in row:
        step = {Op.F: 1, Op.B: -1}.get(op, made.num_stages)  # others come from and go to none
        if 0 <= (came := stage - step) < made.num_stages:
            if made.placement[came] != rank:
                posted[made.placement[came], rank, op is Op.B].remove((stage, chunk))
                if op is Op.B:
                    live[op, stage, chunk] = True
            elif op is Op.F:
                del live[op, stage, chunk]
        if 0 <= (goes := stage + step) < made.num_stages:
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


def problem_of_two(placement, lengths, cap=UNLIMITED_BYTES):
    return Problem(lengths, placement.rank_of, (cap,) * placement.num_ranks)


def test_placements_may_have_other_messages_in_flight_than_is_guessed():
    asked = problem_of_two(Placement("looped", 4, 4), (4096,) * 24)
    made = plan(asked, costs_of(16))
    guess = message_room(asked, made.messages.num_bytes)
    assert max(made.message_bytes) > 0
    assert made.message_bytes != guess
    assert (made.message_bytes, check(made)) == (message_peaks(made, lower(made)), [])
    few = tuple(size - 1 for size in made.message_bytes)
    short = replace(made, message_bytes=few, static_bytes=tuple(size - 1 for size in made.static_bytes))
    assert "are set aside for them" in str(check(short)[0])


def test_where_messages_need_more_room_the_candidates_of_the_table_are_made_again_with_it(monkeypatch):
    """Orders of several stages per rank say how many messages are in flight only when they are known."""
    set_room = Mock(side_effect=Candidates.set_room, autospec=True)
    monkeypatch.setattr(Candidates, "set_room", lambda self, *args, **named: set_room(self, *args, **named))
    placement, costs = Placement("looped", 4, 2), costs_of(8)
    lengths = web_lengths(30, 2, longest=16384)
    free = plan(problem_of_two(placement, lengths), costs)
    cap = int(0.7 * max(free.static_bytes) + 0.3 * max(free.predicted.peak_bytes))
    made = plan(problem_of_two(placement, lengths, cap), costs)
    assert check(made) == []
    assert set_room.called
    assert all(peak <= cap for peak in simulate(made).peak_bytes)


def times_of(line, rank, action):
    at = line.plan.actions(rank).index(action)
    return line.start_us[rank][at], line.end_us[rank][at]


UNIT = HOST_UNIT_BYTES


def test_keys_and_values_are_there_from_the_first_slices_forward_and_their_gradient_from_the_last_slices_backward():
    line = simulate(replace(sliced(), kv_offload=(KVOffload(1, 0, 40, 2 * UNIT),)))
    begin, _ = times_of(line, 1, Action(Op.F, 1, 0))
    turn, _ = times_of(line, 1, Action(Op.B, 1, 1))
    _, end = times_of(line, 1, Action(Op.B, 1, 0))
    assert host_memory(line, 1) == [(0.0, 0), (begin, UNIT), (turn, 3 * UNIT), (end, 0)]
    assert host_peak_bytes(line.plan, line) == [0, 3 * UNIT]


def test_without_backward_they_go_with_the_last_slices_forward():
    line = simulate(replace(evaluation(), kv_offload=(KVOffload(0, 0, 40, 50),)))
    assert host_memory(line, 0) == [(0.0, 0), (0.0, UNIT), (times_of(line, 0, Action(Op.F, 0, 1))[1], 0)]


def test_what_is_offloaded_is_there_from_where_its_offload_is_issued_to_where_its_load_is():
    """0O1 and 0L0 run next to 0F2, which starts at 20, and 0L1 next to 0B2."""
    line = simulate(make_plan(["0F0 0F1 0F2 0B2 0B0 0B1"], whole(2, 2, 2), copies=["0O0 0O1 0L0 0L1"], offload_share=0.5))
    assert host_memory(line, 0) == [(0.0, 0), (10.0, UNIT), (20.0, 2 * UNIT), (20.0, UNIT), (30.0, 0)]


def test_a_rank_with_more_at_the_host_than_it_may_have_is_found():
    plan = replace(sliced(), kv_offload=(KVOffload(0, 0, UNIT, 2), KVOffload(1, 0, UNIT, 2)))
    cap = 2 * UNIT
    assert check(replace(plan, host_cap_bytes=(cap, cap))) == []
    assert only_fault(replace(plan, host_cap_bytes=(cap, cap - 1))).endswith(f" us, 1 above the cap of {cap - 1}")
    assert only_fault(replace(plan, host_cap_bytes=(cap,))) == "host_cap_bytes has 1 entries for 2 ranks"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (KVOffload(2, 0, 1, 1), "keys and values of sequence 0 in host memory of stage 2: there are 2 stages"),
        (KVOffload(0, 1, 1, 1), "keys and values of sequence 1 in host memory of stage 0: the sequence is not cut into slices"),
        (KVOffload(0, 7, 1, 1), "keys and values of sequence 7 in host memory of stage 0: the sequence is not cut into slices"),
        (KVOffload(0, 0, -1, 1), "keys and values of sequence 0 in host memory of stage 0 take -1 bytes and their gradient 1"),
    ],
)
def test_only_sequences_that_are_cut_can_have_theirs_there(entry, reason):
    assert reason in only_fault(replace(sliced(), kv_offload=(entry,)))


def test_once_on_each_stage():
    assert faults(replace(sliced(), kv_offload=(KVOffload(0, 0, 1, 1),) * 2)) == [
        "keys and values of sequence 0 in host memory of stage 0 are there twice"
    ]


def entries_of(plan, cache, gradient):
    return tuple(KVOffload(stage, one, cache, gradient) for stage in range(plan.num_stages) for one in slices_of(plan))


@given(sound_plans(min_time=1), st.integers(0, 99), st.integers(0, 99))
def test_nothing_is_left_at_the_host(plan, cache, gradient):
    line = simulate(replace(plan, kv_offload=entries_of(plan, cache, gradient)))
    for rank in range(plan.num_ranks):
        levels = [size for _, size in host_memory(line, rank)]
        assert levels[-1] == 0
        assert min(levels) >= 0


@given(sound_plans(min_time=1, shared=True), st.integers(0, 9 * UNIT), st.integers(0, 9 * UNIT))
def test_in_the_order_of_a_run_there_is_as_much_at_the_host(plan, cache, gradient):
    """A run takes memory for an offload, and gives it back to others, when it issues the copies."""
    sizes = {action: 7 * UNIT * (1 + action.chunk) + 1 for row in plan.copies for action, *_ in row}
    copies = tuple(tuple(_moving(copy, sizes[copy.action]) for copy in row) for row in plan.copies)
    plan = replace(plan, copies=copies, kv_offload=entries_of(plan, cache, gradient))
    peaks, changes = host_peak_bytes(plan), list(kv_offload_changes(plan.kv_offload, slices_of(plan), plan.forward_only))
    for row, peak in zip(lower(plan), peaks, strict=True):
        here = most = 0
        for action in row:
            if action in sizes:
                here += in_units(sizes[action]) * (1 if action.op is Op.O else -1)
            here += sum(size for when, at_end, size in changes if when == action and not at_end)
            most = max(most, here)
            here += sum(size for when, at_end, size in changes if when == action and at_end)
        assert most == peak


def _moving(copy, size):
    moved = (0, size) if copy.action.op is Op.O else (size, 0)
    return copy._replace(alloc_bytes=moved[0], free_bytes=moved[1])


def test_where_most_orders_have_no_room_for_their_messages_an_order_with_few_in_flight_is_planned():
    assert check(plan(problem_of_two(Placement("looped", 4, 2), (400_000, *[200] * 30), 326 << 30), costs_of(8))) == []


def random_costs(draw: random.Random, stages: int) -> PipelineCosts:
    def stage(last: bool) -> StageCosts:
        layer, extra, kv = draw.uniform(20, 90), draw.uniform(0, 20), draw.uniform(0, 9)
        return stage_of(
            num_layers=draw.randint(1, 4),
            forward=LinearTime(1.0, draw.random()),
            backward=LinearTime(1.0, 2 * draw.random() + 0.5),
            weight=LinearTime(0.0, 0.2),
            layer_bytes_per_token=layer,
            attended_bytes_per_token=draw.choice([None, draw.uniform(kv, layer)]),
            recomputed_layer_bytes_per_token=draw.uniform(1, 9),
            recompute={
                "selective": ModeCosts(LinearTime(0.5, draw.random()), draw.uniform(9, layer)),
                "mlp": ModeCosts(
                    LinearTime(0.3, draw.random()),
                    mlp := draw.uniform(kv, layer),
                    draw.choice([None, draw.uniform(mlp, layer)]),
                ),
            },
            extra_bytes_per_token=extra,
            head_bytes_per_token=extra / 2 if last else 0.0,
            kv_bytes_per_token=kv,
            kv_gradient_bytes_per_token=draw.choice([None, 2 * kv]),
            weight_bytes_per_token=draw.uniform(0, 90),
            static=Static(weights=draw.randint(0, 99), gradients=draw.randint(0, 99), optimizer=draw.randint(0, 99)),
            workspace_bytes=draw.randint(0, 999) if last else 0,
        )

    made = [stage(s == stages - 1) for s in range(stages)]
    bare = PipelineCosts("random", tuple(made), draw.uniform(1, 9), 1.0, 0.01, 1.0, 0.005)
    share, buffers = draw.choice([0.0, 0.07]), [draw.randint(0, 99)] * stages
    return replace(on_device(bare, share, buffers=buffers), exchange_bytes_per_token=1.5 * (stages % 2))


def steps(made: Plan):
    return [step for _, rows in made.tables for row in rows for step in row]


def recomputed_ahead(made: Plan, share: float) -> Plan:
    """The plan with an action of its own for every recompute, ahead of its backward, which takes a share of its bytes."""

    def parts(step: Step) -> list[Step]:
        op, stage, c = step.action
        if op is not Op.B or not made.recompute[stage][c].num_layers:
            return [step]
        taken, took_us = int(share * step.alloc_bytes), made.recompute_us[stage][c]
        rest = step._replace(time_us=step.time_us - took_us, alloc_bytes=step.alloc_bytes - taken)
        return [Step(step.action._replace(op=Op.R), took_us, taken, 0), rest]

    rows = tuple(tuple(part for step in row for part in parts(step)) for row in made.ranks)
    return replace(made, ranks=rows, predicted=Prediction.none(made.num_ranks))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_recompute_of_its_own_has_what_it_made_until_the_backward_is_done(share: float):
    costs = random_costs(random.Random(6), 2)
    made = recomputed_ahead(plan(problem((900, 60, 300), 2), costs, Options(recompute=1)), share)
    assert check(made) == []
    again = [step.action for step in steps(made) if step.action.op is Op.R]
    assert again
    assert list(faults_of_breakdown(made, costs)) == []
    takes = memory_breakdown(made, costs).takes
    assert all(set(takes[action]) == {item.RECOMPUTED} for action in again)


def test_static_bytes_are_their_items():
    static = Static.of(1000.5, 6 + 12 / 8)
    assert (static.weights, static.gradients, static.optimizer) == (2001, 4002, 1500)
    assert (static.num_bytes, Static.of(10, 3.0)) == (int(1000.5 * 7.5), Static(weights=20, gradients=10))


def test_what_fragments_is_a_share_of_what_comes_and_goes():
    costs = on_device(random_costs(random.Random(1), 2), 0.25)
    moment = memory_breakdown(plan(problem((300, 20), 2), costs), costs).peak(0)
    passing = {name: size for name, size in moment.items.items() if name in item.DYNAMIC}
    assert passing[item.FRAGMENTATION] == pytest.approx(sum(passing.values()) / 5, abs=10)


def test_ranks_need_room_for_the_layer_that_runs_and_for_messages_in_flight():
    """In 1F1B the first rank has up to two payloads of 50 and 7 tokens, 2 bytes each, before a gradient of 50 is received."""
    sizes = {"layer_bytes_per_token": 10, "recomputed_layer_bytes_per_token": 1, "kv_bytes_per_token": 0}
    stage = stage_of(num_layers=1, forward=LinearTime(), backward=LinearTime(), **sizes)
    bare = PipelineCosts("three", (stage,) * 3, hidden_bytes_per_token=2.0)
    made = plan(problem((7, 50, 3), 3), on_device(bare, 0.0), Options(planner="1f1b"))
    assert made.message_bytes == message_peaks(made, lower(made))
    assert made.static_bytes == tuple(50 * 10 + size for size in made.message_bytes)
    assert plan(problem((7, 50, 3), 3), bare, Options(planner="1f1b")).static_bytes == (0, 0, 0)


def by_hand(recompute: int) -> tuple[int, dict[str, int]]:
    """Ten tokens in two slices, on one stage of three layers: tokens of the last slice, and what its backward takes."""
    stage = stage_of(forward=LinearTime(10.0, 1.0), backward=LinearTime(20.0, 2.0), **THREE_LAYERS)
    costs = PipelineCosts("by hand", (stage,), hidden_bytes_per_token=4.0)
    made = plan(problem((10,), 1), costs, Options(slices=2, recompute=recompute))
    backward = next(step.action for step in made.ranks[0] if step.action.op is Op.B)
    takes = memory_breakdown(made, costs).takes[backward]
    return made.chunks[backward.chunk].num_tokens, {name: size for name, size in takes.items() if size}


def test_a_backward_that_recomputes_holds_most_at_its_last_layer_and_others_at_their_first_where_the_head_has_given_way():
    tokens, takes = by_hand(recompute=3)
    assert takes == {
        item.CACHE_GRADIENT: 3 * 16 * 10,
        item.RECOMPUTED: tokens * (100 - 16 - 8),
        item.RECOMPUTE_MODE_ITEMS["full"]: -tokens * 2 * 8,
        item.HEAD: -tokens * 2,
    }
    tokens, takes = by_hand(recompute=0)
    assert takes == {item.CACHE_GRADIENT: 16 * 10, item.HEAD: -tokens * 2}
