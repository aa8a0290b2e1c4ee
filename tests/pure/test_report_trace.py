"""Chrome traces of plans and runs."""

from collections import defaultdict

import pytest

from megatron_epp.plan.simulate import simulate
from megatron_epp.report.trace import trace
from tests.support.plan.report_plans import measured_run, sliced_plan, v_shaped_plan, with_offload


def events(made, phase):
    return [event for event in made["traceEvents"] if event["ph"] == phase]


def threads(made):
    """Names of the threads by (pid, tid)."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events(made, "M") if e["name"] == "thread_name"}


def on_stream(made, stream):
    names = threads(made)
    return [event for event in events(made, "X") if names[event["pid"], event["tid"]] == stream]


def test_every_planned_action_is_one_box_at_the_simulators_time_and_the_counter_its_live_bytes():
    plan = sliced_plan(num_ranks=4, slices=3, batched=4)
    timeline = simulate(plan)
    boxes = {(e["pid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in on_stream(trace(plan), "planned compute")}
    expected = {
        (rank, str(step.action)): (timeline.start_us[rank][i], timeline.end_us[rank][i])
        for rank, steps in enumerate(plan.ranks)
        for i, step in enumerate(steps)
    }
    assert boxes.keys() == expected.keys()
    for key, times in expected.items():
        assert boxes[key] == pytest.approx(times)
    for rank in range(plan.num_ranks):
        counter = [(e["ts"], e["args"]["bytes"]) for e in events(trace(plan), "C") if e["pid"] == rank]
        assert counter == timeline.live_bytes(rank)
        assert max(level for _, level in counter) == timeline.peak_bytes[rank]


def test_every_message_between_ranks_is_one_arrow_from_its_producer_to_its_consumer():
    plan = sliced_plan(num_ranks=3, slices=3, batched=2)
    made = trace(plan)
    ends = defaultdict(dict)
    for event in [*events(made, "s"), *events(made, "f")]:
        assert event["ph"] not in ends[event["id"]], "an id is used by one pair only"
        ends[event["id"]][event["ph"]] = event
    messages = simulate(plan).messages()
    assert len(ends) == len(messages) == 2 * 2 * len(plan.chunks)
    boxes = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events(made, "X")]
    for pair in ends.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert abs(pair["s"]["pid"] - pair["f"]["pid"]) == 1
        for event in pair.values():
            inside = [b for b in boxes if b[:2] == (event["pid"], event["tid"]) and b[2] <= event["ts"] < b[3]]
            assert len(inside) == 1, "an arrow without a box at either end is not drawn"


def test_there_is_no_arrow_between_stages_on_one_rank():
    made = trace(v_shaped_plan())
    assert [(s["pid"], f["pid"]) for s, f in zip(events(made, "s"), events(made, "f"), strict=True)] == [(1, 0), (0, 1)]


def test_a_run_lies_beside_the_plan_in_the_same_process():
    plan = sliced_plan()
    measured = measured_run(plan)
    made = trace(plan, measured)
    assert set(threads(made).values()) == {"planned compute", "measured compute"}
    boxes = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in on_stream(made, "measured compute")}
    expected = {(r, str(e.action)): (e.start_us, e.end_us - e.start_us) for r, es in enumerate(measured.ranks) for e in es}
    assert boxes == expected
    ids = [event["id"] for event in events(made, "s")]
    assert len(ids) == len(set(ids)) == 2 * len(simulate(plan).messages())


def test_copies_run_on_a_stream_of_their_own():
    plan = with_offload(sliced_plan(), chunk=0)
    copies = on_stream(trace(plan), "planned copy")
    assert [(e["pid"], e["name"], e["dur"]) for e in copies] == [
        (0, "0O0", pytest.approx(50.0)),
        (0, "0L0", pytest.approx(50.0)),
    ]
