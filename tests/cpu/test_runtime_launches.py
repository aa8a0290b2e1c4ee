"""Launches of ranks, recorded without a GPU, run on any hardware queues, and stand in the order that keeps ranks busy."""

import functools
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest

from megatron_epp.plan import Op
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.serialize import to_json
from tests.support.plan.queue_machine import Machine, launches, rows_of, times_of
from tests.support.runtime.launch_recorder import (
    COMPUTE,
    LOAD,
    OFFLOAD,
    RECEIVE,
    REDUCTION,
    SEND,
    UPLOAD,
    WAIT,
    RecordedLaunch,
    RecordedStage,
    record,
)
from tests.support.runtime.runtime_plans import offloading, offloading_kv, planned, two_ranks
from tests.support.seeds import spread_by_default

LENGTHS = (40, 22, 13, 9, 9, 6, 5, 3)
PLANS = {
    "one stage per rank": partial(planned, LENGTHS, (1, 1, 1, 1), slices=4),
    "looped": partial(planned, LENGTHS, (1, 1, 1, 1), placement=(0, 1, 0, 1), slices=4),
    "v": partial(planned, LENGTHS, (1, 1, 1, 1), placement=(0, 1, 1, 0), slices=4),
    "split weight gradients": partial(planned, LENGTHS, (1, 1, 1), slices=4, split_weight=True),
    "offload": lambda: _with_copies(planned(LENGTHS, (1, 1, 1), slices=4)),
}
_COPY_US = 300.0


@dataclass(frozen=True, slots=True)
class Span:
    """A launch of a rank on the machine; it starts to wait for its other sides at `start_us`."""

    rank: int
    launch: RecordedLaunch
    start_us: float
    end_us: float


def timeline(plans, queues=1, reduce_us=0.0, num_buckets=1, alter=lambda launches: launches, coalesces=True) -> list[Span]:
    """Record the replicas' plans and run all their ranks together.

    Args:
        plans: of the replicas of one pipeline, whose reductions join them.
        queues: hardware queues of each rank.
        reduce_us: time of the reduction of every bucket.
        num_buckets: of the gradients of every rank's first stage.
        coalesces: the gradients of a rank's other stages are reduced by one launch; else they have as many buckets.
    """
    make_stage = partial(RecordedStage, num_buckets=num_buckets, coalesces=coalesces)
    recorded = [
        alter(record(plan, rank, number, make_stage).launches)
        for number, plan in enumerate(plans)
        for rank in range(plan.num_ranks)
    ]
    times_us = [times for plan in plans for times in times_of(to_json(plan))]
    for times, row in zip(times_us, recorded, strict=True):
        times |= {launch.text: reduce_us for launch in row if launch.kind == REDUCTION}
    machine = Machine(recorded, queues, times_us=times_us)
    stuck = machine.run()
    assert not stuck, stuck
    return [
        Span(rank, launch, machine.starts_us[rank, number], machine.ends_us[rank, number])
        for rank, launches in enumerate(recorded)
        for number, launch in enumerate(launches)
    ]


def _with_copies(plan):
    """The plan with half of every chunk copied away and back, in about the time of its forward."""
    plan = offloading(plan, 0.5)
    return replace(plan, copies=tuple(tuple(copy._replace(time_us=_COPY_US) for copy in row) for row in plan.copies))


CASES = {**PLANS, "KV offload": lambda: offloading_kv(offloading(two_ranks(), 0.5))}
LONG_US = 1e9


@functools.cache
def recorded(case):
    plan = CASES[case]()
    return plan, [record(plan, rank).launches for rank in range(plan.num_ranks)]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_launches_what_the_lowered_plan_says_in_its_order(case):
    plan, ranks = recorded(case)
    for rank, row in enumerate(rows_of(to_grid(lower(plan)))):
        wanted = [one.text for one in launches(plan.placement, rank, row) if "before" not in one.text]
        wanted = [text for text in wanted if Op.FREE not in text]
        assert [one.text for one in ranks[rank] if one.text in wanted] == wanted


@pytest.mark.parametrize("queues", [1, 8, 32])
@pytest.mark.parametrize("case", CASES)
def test_recorded_launches_end_on_any_number_of_hardware_queues(case, queues):
    _, ranks = recorded(case)
    for seed in range(3):
        assert Machine(ranks, queues, seed=seed).run() == []


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_of_a_stage_are_reduced_behind_its_last_send(case):
    plan, ranks = recorded(case)
    for stage, rank in enumerate(plan.placement):
        own = [(n, one.kind) for n, one in enumerate(ranks[rank]) if one.action and one.action.stage == stage]
        (reduction,) = (number for number, kind in own if kind == REDUCTION)
        assert all(number < reduction for number, kind in own if kind in (SEND, COMPUTE))


@pytest.mark.parametrize("case", CASES)
def test_no_stream_is_shared_by_uploads_loads_offloads_messages_and_reductions(case):
    _, ranks = recorded(case)
    for row in ranks:
        kinds = {}
        for one in row:
            kinds.setdefault(one.stream, set()).add(one.kind)
        assert all(len(kinds[stream] - {WAIT}) <= 1 for stream in kinds)


@pytest.mark.parametrize("case", CASES)
def test_small_copies_to_the_device_are_one_upload_that_compute_waits_for_once_ahead_of_its_first_action(case):
    _, ranks = recorded(case)
    for row in ranks:
        (upload,) = (number for number, one in enumerate(row) if one.kind == UPLOAD)
        (wait,) = (number for number, one in enumerate(row) if upload in one.waits)
        assert not row[upload].waits
        assert row[wait].stream == COMPUTE
        assert wait < min(number for number, one in enumerate(row) if one.kind == COMPUTE)


@pytest.mark.parametrize("case", ["looped", "offload"])
def test_on_one_queue_the_upload_of_the_next_batch_delays_nothing_wherever_a_thread_launches_it(case):
    plan = CASES[case]()
    alone = _compute_ends_us(timeline([plan]))
    for share in (0.1, 0.6):
        assert _compute_ends_us(timeline([plan], alter=functools.partial(_with_next_upload, share))) == alone


def _with_next_upload(share, row):
    """The launches of a rank with a further upload behind a share of them."""
    (upload,) = (number for number, one in enumerate(row) if one.kind == UPLOAD)
    at = upload + 1 + round(share * (len(row) - upload - 1))
    for one in row:
        one.waits = [number + (number >= at) for number in one.waits]
    return [*row[:at], RecordedLaunch("upload of the next batch", row[upload].stream, [upload], kind=UPLOAD), *row[at:]]


def test_an_offload_waits_for_a_load_only_if_it_is_given_the_memory_that_the_load_reads():
    row = record(offloading(two_ranks(), 0.5), 1).launches  # in which a chunk begins when all others have come back
    loads, offloads = ([number for number, one in enumerate(row) if one.kind == kind] for kind in (LOAD, OFFLOAD))
    late = [number for number in offloads if _all_waits(row, number) & set(loads)]
    assert late == [number for number in offloads if number > loads[0]]
    assert any(row[n].kind == LOAD for one in row if one.stream == row[offloads[0]].stream for n in one.waits)


def test_a_stages_reduction_overlaps_with_the_cool_down_of_the_stages_before_it():
    plan = CASES["one stage per rank"]()
    spans = timeline([plan], reduce_us=max(step.time_us for step in plan.ranks[0]))
    reductions = {span.launch.action.stage: span for span in spans if span.launch.kind == REDUCTION}
    last_of = {span.rank: span.end_us for span in spans if span.launch.kind == COMPUTE}
    for before, stage in pairwise(sorted(reductions)):
        assert reductions[stage].start_us < last_of[before]


@spread_by_default(2, case=("one stage per rank", "looped", "v", "split weight gradients"), num_buckets=(1, 2), queues=(1, 8))
def test_compute_never_waits_for_the_reduction_of_a_bucket_however_long_it_takes(case, num_buckets, queues):
    ends_us = [_compute_ends_us(timeline([CASES[case]()], queues, time_us, num_buckets)) for time_us in (LONG_US, 0.0)]
    assert ends_us[0] == ends_us[1]


def test_on_one_queue_a_second_bucket_ahead_of_the_last_send_would_hold_the_pipeline_up():
    plan = CASES["one stage per rank"]()
    assert _compute_ends_us(timeline([plan], 1, LONG_US, 2, _reduced_before_the_last_send)) > LONG_US


def test_on_one_queue_buckets_of_a_ranks_later_stages_would_hold_up_its_first_one():
    assert _compute_ends_us(timeline([CASES["looped"]()], 1, LONG_US, 2, coalesces=False)) > LONG_US


def _compute_ends_us(spans):
    return max(span.end_us for span in spans if span.launch.kind == COMPUTE)


def _reduced_before_the_last_send(row):
    """The launches of a rank, its reductions ahead of its last send; streams and waits stay."""
    sends = [number for number, one in enumerate(row) if one.kind == SEND and one.action.op is Op.SEND_B]
    reductions = [number for number, one in enumerate(row) if one.kind == REDUCTION]
    if not sends:
        return row
    send, first, end = sends[-1] - 1, reductions[0] - 1, reductions[-1] + 1  # the first two with their waits for compute
    order = [*range(send), *range(first, end), *range(send, first), *range(end, len(row))]
    place = {old: new for new, old in enumerate(order)}
    for one in row:
        one.waits = [place[number] for number in one.waits]
    return [row[old] for old in order]


def test_messages_are_launched_behind_the_compute_that_makes_them_and_compute_behind_those_it_needs():
    _, ranks = recorded("looped")
    for row in ranks:
        at = {one.text: number for number, one in enumerate(row)}
        for receive in (one for one in row if one.kind == RECEIVE):
            op, stage, chunk = receive.action
            needs = f"{stage}{op.removeprefix('RECV_')}{chunk}"
            assert at[receive.text] in _all_waits(row, at[needs])
        for send in (one for one in row if one.kind == SEND):
            op, stage, chunk = send.action
            assert at[f"{stage}{op.removeprefix('SEND_')}{chunk}"] in _all_waits(row, at[send.text])


def _all_waits(row, number):
    found, todo = set(), [number]
    while todo:
        for other in row[todo.pop()].waits:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found
