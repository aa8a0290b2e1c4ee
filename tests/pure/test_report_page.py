"""Plans and runs as pages, text, tables, Gantt pictures and Chrome traces; a run passes as near as Megatron's own."""

import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import fields, replace
from itertools import accumulate

import matplotlib.colors
import numpy as np
import pytest

from megatron_epp.cost.memory import DYNAMIC, LOSS_BLOCK, MESSAGES, WORKING, Static
from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.boxes import recompute_in_backward
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.measured import Event, Measured
from megatron_epp.plan.memory_breakdown import MemoryBreakdown
from megatron_epp.plan.operations import operation, operations
from megatron_epp.plan.plan import UNLIMITED_BYTES
from megatron_epp.plan.plan_figures import main_items, recompute_share
from megatron_epp.plan.serialize import save
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.trace import trace
from megatron_epp.plan.units import format_bytes
from megatron_epp.planner import plan as plan_batch
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.tools.cli.first_run.training import deviation
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.report.gantt import gantt, item_colours, memory_picture, side_by_side
from megatron_epp.tools.report.page.html import Shown, embedded, item_columns, page, plan_columns, save_page
from megatron_epp.tools.report.text import clip, format_cap, format_us, summary
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.plan.report_plans import measured_run, predicted, sliced_plan, v_shaped_plan, with_offload

SMALL = ["--stages", "2", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "4"]
OPS = [each.op for each in operations()]


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def actions_of(columns):
    rows = zip(columns["op"], columns["stage"], columns["chunk"], strict=True)
    return [Action(OPS[op], stage, chunk) for op, stage, chunk in rows]


@pytest.mark.parametrize("plan", [sliced_plan(num_ranks=3, slices=3), v_shaped_plan(), with_offload(sliced_plan(), 0)])
def test_boxes_are_the_simulators_and_chunks_the_plans(plan):
    timeline, shown = simulate(plan), plan_columns(Shown("p", plan))
    columns, chunks = shown["planned"], shown["chunks"]
    steps = [step for table in (plan.ranks, plan.copies) for row in table for step in row]
    starts = [time_us for table in (timeline.start_us, timeline.copy_start_us) for row in table for time_us in row]
    assert actions_of(columns) == [step.action for step in steps]
    assert columns["start_us"] == pytest.approx(starts, abs=1e-3)
    assert columns["time_us"] == pytest.approx([step.time_us for step in steps], abs=2e-3)
    assert columns["alloc"] == [step.alloc_bytes for step in steps]
    assert columns["free"] == [step.free_bytes for step in steps]
    assert columns["makespan_us"] == timeline.makespan_us
    assert columns["lanes"] == [len(row) for row in plan.ranks] + [len(row) for row in plan.copies or ((),) * plan.num_ranks]
    assert chunks["segments"] == [[n for segment in chunk.segments for n in segment] for chunk in plan.chunks]
    assert chunks["kind"] == [chunk.kind(plan.lengths) for chunk in plan.chunks]


def test_memory_is_the_simulators_on_ranks_with_copies_and_without():
    plan = with_offload(sliced_plan(), chunk=0)
    timeline, columns = simulate(plan), plan_columns(Shown("p", plan))
    planned, memory = columns["planned"], columns["memory"]
    assert list(memory["events"]) == [0], "rank 1 has no copies"
    codes = memory["events"][0]["code"]
    deltas = [-planned["free"][code // 2] if code % 2 else planned["alloc"][code // 2] for code in codes]
    assert deltas == [event.delta_bytes for event in timeline.memory_events(0)]
    assert max(accumulate(deltas, initial=memory["static"][0])) == memory["peak"][0] == timeline.peak_bytes[0]
    assert memory["cap"] == list(plan.cap_bytes)
    assert plan_columns(Shown("p", replace(plan, cap_bytes=(UNLIMITED_BYTES,) * 2)))["memory"]["cap"] == [None, None]


def test_reasons_lead_back_along_the_critical_path():
    columns = plan_columns(Shown("p", sliced_plan(num_ranks=3)))["planned"]
    path = columns["critical"]
    assert [b - columns["because"][b] for b in path[1:]] == path[:-1]
    ends = [start + time for start, time in zip(columns["start_us"], columns["time_us"], strict=True)]
    assert (max(ends), set(columns["transfers"])) == (ends[path[-1]], {"activation", "gradient"})


def test_recompute_has_its_share_of_the_backward_and_its_modes():
    plan = sliced_plan(recompute=2)
    columns = plan_columns(Shown("p", plan))["planned"]
    shares = recompute_in_backward(plan)
    again = columns["recompute"]
    times = zip(again["box"], again["time_us"], strict=True)
    found = {actions_of(columns)[box]: time_us / columns["time_us"][box] for box, time_us in times}
    assert (found, again["modes"]) == (pytest.approx(shares), [str(plan.recompute[0][0])])


def test_a_run_is_joined_with_its_plan():
    plan = with_offload(sliced_plan(), chunk=0)
    run = measured_run(plan, slowdown=2.0)
    columns = plan_columns(Shown("p", plan, run))
    measured, planned = columns["measured"], columns["planned"]
    assert measured["makespan_us"] == run.makespan_us
    for box, action in enumerate(actions_of(measured)):
        assert actions_of(planned)[measured["planned"][box]] == action
        assert measured["time_us"][box] == pytest.approx(2 * planned["time_us"][measured["planned"][box]])
    assert measured["lanes"] == [len(events) for events in run.ranks] + [0] * 4
    assert measured["critical"], "a run has a critical path of its own"


def test_no_text_ends_the_script_in_which_it_stands():
    bad = "</script><script>alert(1)</script><!-- \u2028 &"
    text = page([Shown(bad, replace(sliced_plan(), notes=(bad,), planner=bad, costs=bad))])
    assert text.count("</script") == page([Shown("p", sliced_plan())]).count("</script")
    assert bad not in text
    assert (data_of(text)["plans"][0]["name"], json.loads(embedded([bad]))) == (bad, [bad])


def test_the_page_names_no_other_file_and_forbids_requests():
    text = page([Shown("p", sliced_plan())])
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", text)
    assert "default-src 'none'" in text
    assert "<!--data-->" not in text


def test_nothing_to_show_is_told(tmp_path):
    for show in (side_by_side, lambda plans: save_page(plans, tmp_path / "page.html")):
        with pytest.raises(PlanError, match="no planner found one"):
            show([])


def test_show_writes_a_plan_a_run_and_a_folder_of_runs(tmp_path, capsys):
    plan, out = sliced_plan(), tmp_path / "page.html"

    def shown(*paths):
        assert main(["show", *map(str, paths), "-o", str(out)]) == 0
        return data_of(out.read_text())["plans"]

    save(plan, tmp_path / "plan.json")
    measured_run(plan).save(tmp_path / "measured.json")
    assert shown(tmp_path / "plan.json")[0]["measured"] is None
    assert shown(tmp_path)[0]["measured"] is not None
    save(plan, tmp_path / "plan-7.json")
    assert [one["name"] for one in shown(tmp_path)] == ["plan", "plan-7"]
    assert [one["name"] for one in shown(tmp_path / "plan-7.json", tmp_path / "plan.json")] == ["plan-7", "plan"]
    assert main(["show", str(tmp_path)]) == 2
    assert "several plans (plan, plan-7)" in capsys.readouterr().err


def test_compare_and_memory_write_pages_and_pictures(tmp_path):
    out = tmp_path / "page.html"
    planners = ["--planner", "greedy", "--planner", "1f1b"]
    for path in (out, tmp_path / "picture.png"):
        assert main(["compare", "--lengths", "900,50", *planners, *SMALL, "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [one["name"] for one in data_of(out.read_text())["plans"]] == ["greedy", "1f1b"]
    assert main(["memory", "--lengths", "900,50", *SMALL, "--memory-out", str(out)]) == 0
    (shown,) = data_of(out.read_text())["plans"]
    assert len(shown["items"]["ranks"]) == 2


@pytest.fixture(scope="module")
def breakdown():
    costs, asked = pipeline(2), problem((8192, 700, 300), 2, 64 << 30)
    return memory_breakdown(plan_batch(asked, costs), costs)


def test_the_areas_of_a_rank_are_stacked_up_to_its_live_bytes(breakdown):
    picture = memory_picture(breakdown)
    assert [axis.get_ylabel() for axis in picture.axes] == ["rank 0\nGiB", "rank 1\nGiB"]
    assert "planned memory of 3 sequences in" in picture.axes[0].get_title(loc="left")
    for rank, axis in enumerate(picture.axes):
        highest = max(path.vertices[:, 1].max() for areas in axis.collections for path in areas.get_paths())
        assert highest * 2**30 == pytest.approx(breakdown.timeline.peak_bytes[rank], rel=1e-6)
        last = max(path.vertices[:, 0].max() for areas in axis.collections for path in areas.get_paths())
        assert last * 1e3 == pytest.approx(breakdown.timeline.makespan_us)
    assert picture.axes[0].get_xlim() == pytest.approx((0.0, breakdown.timeline.makespan_us / 1e3))
    (legend,) = picture.legends
    assert [entry.get_text() for entry in legend.get_texts()] == list(breakdown.items)


def test_the_items_of_a_page_add_up_to_the_live_bytes(breakdown):
    columns = item_columns(breakdown)
    assert columns["names"] == list(breakdown.items)
    for rank, row in enumerate(columns["ranks"]):
        changes = list(zip(*[iter(row["changes"])] * 3, strict=True))
        sums = [sum(delta for moment, _, delta in changes if moment <= at) for at in range(len(row["time_us"]))]
        assert sums == [num_bytes for _, num_bytes in breakdown.timeline.live_bytes(rank)]


def test_a_long_plan_is_cut_to_the_width_and_to_a_few_chunks_where_there_are_limits():
    plan = sliced_plan(num_ranks=4, slices=20, batched=80)
    lines = summary(plan, width=80, max_chunks=5).splitlines()
    grid = [line for line in lines if line.startswith("rank ") and "|" in line]
    assert len(grid) == 4
    assert all(len(line) == 80 and line.endswith("…") for line in grid)
    assert "  ... and 95 more chunks" in lines
    text = summary(plan, width=None, max_chunks=None)
    assert "…" not in text
    assert all(str(step.action) in text.split() for steps in plan.ranks for step in steps)


def test_a_rank_with_more_work_than_the_others_is_named_with_what_to_do():
    plan = sliced_plan()
    slow = tuple(step._replace(time_us=1.5 * step.time_us) for step in plan.ranks[1])
    text = summary(predicted(replace(plan, ranks=(plan.ranks[0], slow))))
    assert "rank 1 computes 1.20 times as long" in text
    assert "--layout balanced" in text


def test_what_offload_moves_is_told_where_there_is_any():
    plan = sliced_plan(recompute=0)
    assert "recompute takes" not in summary(plan)
    assert "offload copies" not in summary(plan)
    copied = with_offload(plan, 0)
    assert "offload copies 1000.00 KiB to host memory and back in 100.0 us, overlapped with compute" in summary(copied)
    assert "ranks share" not in summary(copied)
    assert "2 ranks share 1 links to host memory" in summary(replace(copied, host_links=(0, 0)))


def test_recompute_is_a_share_of_compute_and_of_its_backward():
    plan = sliced_plan(recompute=1)
    assert recompute_share(plan) == pytest.approx(0.25 / 3.25)
    assert recompute_in_backward(plan)[Action.parse("0B0")] == pytest.approx(0.25 / 2.25)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0.00 B"), (format_bytes(1536), "1.50 KiB"), (format_bytes(80 * 2**30), "80.00 GiB"),
        (format_cap(UNLIMITED_BYTES), "unlimited"), (format_cap(80 * 2**30), "80.00 GiB"), (format_us(812.5), "812.5 us"),
        (format_us(12345.6), "12.35 ms"), (format_us(3.21e6), "3.210 s"), (clip("abcdef", 4), "abc…"),
        (clip("abcd", 4), "abcd"), (clip("abcdef", None), "abcdef"),
        (main_items({"few": 1, "most": 4, "least": 0, "some": 2}), "4.00 B most, 2.00 B some, 1.00 B few"),
    ],
)  # fmt: skip
def test_numbers_read_well(text, expected):
    assert text == expected


def test_a_measurement_survives_its_file_with_its_processor_times_where_there_are_some(tmp_path):
    measured = measured_run(sliced_plan())
    measured.save(tmp_path / "run.json")
    assert Measured.load(tmp_path / "run.json") == measured
    first, *rest = measured.ranks[0]
    measured = Measured(measured.plan_digest, ((first._replace(cpu_us=7.5), *rest), *measured.ranks[1:]))
    measured.save(tmp_path / "run.json")
    loaded = Measured.load(tmp_path / "run.json")
    assert (loaded, [event.cpu_us for event in loaded.ranks[0]]) == (measured, [7.5, *[None] * len(rest)])


def test_makespan_and_bubble_of_a_run_are_those_of_its_events():
    action = Action.parse
    measured = Measured(
        "d", ((Event(action("0F0"), 0.0, 30.0), Event(action("0SEND_F0"), 30.0, 40.0)), (Event(action("1F0"), 40.0, 100.0),))
    )
    assert measured.makespan_us == 100.0
    assert measured.bubble_fraction == pytest.approx(1 - (30 + 60) / 200), "messages are not compute"


def test_twice_as_far_as_megatrons_own_or_the_floor_is_allowed_and_no_more():
    near = deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0079], floor=1e-6)
    assert (near.theirs, near.allowed) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert near.holds
    assert not deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0081], floor=1e-6).holds
    assert deviation([2.0], [2.0], [2.00001], floor=1e-5).holds
    assert not deviation([2.0], [2.0], [2.0001], floor=1e-5).holds
    found = deviation([2.0, 2.0], [2.0, 2.0], [2.0, math.nan], floor=1.0)
    assert math.isinf(found.ours)
    assert not found.holds


def events(made, phase):
    return [event for event in made["traceEvents"] if event["ph"] == phase]


def threads(made):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events(made, "M") if e["name"] == "thread_name"}


def on_stream(made, stream):
    names = threads(made)
    return [event for event in events(made, "X") if names[event["pid"], event["tid"]] == stream]


def test_every_planned_action_is_one_box_at_the_simulators_time_and_the_counter_its_live_bytes():
    plan = sliced_plan(num_ranks=4, slices=3, batched=4)
    timeline = simulate(plan)
    boxes = {(e["pid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in on_stream(trace(plan), "planned compute")}
    steps = [(rank, i, str(step.action)) for rank, row in enumerate(plan.ranks) for i, step in enumerate(row)]
    expected = {(rank, name): (timeline.start_us[rank][i], timeline.end_us[rank][i]) for rank, i, name in steps}
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
    assert len(ends) == len(simulate(plan).messages()) == 2 * 2 * len(plan.chunks)
    boxes = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events(made, "X")]
    for pair in ends.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert abs(pair["s"]["pid"] - pair["f"]["pid"]) == 1
        for event in pair.values():
            inside = [b for b in boxes if b[:2] == (event["pid"], event["tid"]) and b[2] <= event["ts"] < b[3]]
            assert len(inside) == 1, "an arrow without a box at either end is not drawn"


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
    copies = on_stream(trace(with_offload(sliced_plan(), chunk=0)), "planned copy")
    assert [(e["pid"], e["name"], e["dur"]) for e in copies] == [(0, name, pytest.approx(50.0)) for name in ("0O0", "0L0")]


def bars(axis, label):
    """Start and end in ms of every bar of the collection, and their colours."""
    (found,) = (c for c in axis.collections if c.get_label() == f"_{label}")
    spans = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in found.get_paths()]
    return np.array(spans), found.get_facecolor()


def assert_drawn(axis, label, starts_us, ends_us):
    np.testing.assert_allclose(bars(axis, label)[0], np.array([starts_us, ends_us]).T / 1e3)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_action_is_a_bar_at_the_simulators_time(num_ranks):
    plan = sliced_plan(num_ranks=num_ranks, slices=3, batched=4)
    timeline = simulate(plan)
    axis = gantt(plan).axes[0]
    for rank in range(num_ranks):
        assert_drawn(axis, f"rank {rank} compute", timeline.start_us[rank], timeline.end_us[rank])
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"rank {rank}" for rank in range(num_ranks)]


@pytest.mark.parametrize(("slowdown", "shares_axis"), [(2.0, True), (9.0, False), (0.2, False)])
def test_a_run_is_drawn_below_the_plan_and_has_a_time_axis_of_its_own_where_it_is_far_from_it(slowdown, shares_axis):
    plan = sliced_plan()
    measured = measured_run(plan, slowdown)
    planned_axis, measured_axis, memory_axis = gantt(plan, measured).axes
    assert_drawn(measured_axis, "rank 1 compute", *([event[at] for event in measured.ranks[1]] for at in (1, 2)))
    title = measured_axis.get_title(loc="left")
    assert planned_axis.get_title(loc="left").startswith("planned")
    assert title.startswith("measured")
    assert ("time axis of its own" in title) != shares_axis
    end_us = measured.makespan_us if shares_axis else plan.predicted.makespan_us
    assert planned_axis.get_xlim() == memory_axis.get_xlim() == (0.0, end_us / 1e3)
    assert measured_axis.get_xlim() == (0.0, measured.makespan_us / 1e3)
    assert shares_axis or all("since the start" in axis.get_xlabel() for axis in (planned_axis, measured_axis, memory_axis))


def test_recompute_is_the_front_of_its_backward():
    plan = sliced_plan(recompute=2)
    axis = gantt(plan).axes[0]
    strips, colours = bars(axis, "rank 0 recompute")
    backwards = [i for i, step in enumerate(plan.ranks[0]) if step.action.op is Op.B]
    spans, _ = bars(axis, "rank 0 compute")
    lengths = [plan.chunks[plan.ranks[0][i].action.chunk].num_tokens * 0.5e-3 for i in backwards]
    np.testing.assert_allclose(strips[:, 0], spans[backwards, 0])
    np.testing.assert_allclose(strips[:, 1] - strips[:, 0], lengths)
    assert {matplotlib.colors.to_hex(c).upper() for c in colours} == {operation(Op.R).colour}


NO_RED = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
NO_GREEN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
SEEN = {"by most": np.eye(3), "without red cones": np.array(NO_RED), "without green cones": np.array(NO_GREEN)}
"""Linear sRGB as people see it: Machado, Oliveira and Fernandes, 2009, for a missing kind of cones."""
XYZ_OF_SRGB = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colours, seen):
    """CIELAB of colours as somebody sees them, [colours, 3]."""
    srgb = np.array([matplotlib.colors.to_rgb(colour) for colour in colours])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ seen.T, 0, 1) @ XYZ_OF_SRGB.T
    x, y, z = np.cbrt(xyz / XYZ_OF_SRGB.sum(axis=1)).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN.keys())
def test_items_of_memory_differ_in_colour_for_everybody(seen):
    plan = sliced_plan()
    static = [field.name for field in fields(Static)] + [LOSS_BLOCK, WORKING, MESSAGES]
    takes = {plan.ranks[0][0].action: dict.fromkeys(DYNAMIC, 1)}
    breakdown = MemoryBreakdown(simulate(plan), (dict.fromkeys(static, 1),) * plan.num_ranks, takes, {}, DYNAMIC)
    colours = item_colours(breakdown)
    assert len(colours) == len(static) + len(DYNAMIC)
    points = lab(colours.values(), seen)
    assert np.linalg.norm(points[:, None] - points[None], axis=2)[~np.eye(len(points), dtype=bool)].min() > 15


def test_memory_is_drawn_against_the_cap_which_is_told_instead_where_it_is_far_above():
    plan = sliced_plan(num_ranks=3)
    axis = gantt(plan).axes[-1]
    heights = {line.get_label(): max(line.get_ydata()) for line in axis.lines}
    unit = 2**20
    assert [heights[f"_rank {r}"] for r in range(3)] == pytest.approx([peak / unit for peak in simulate(plan).peak_bytes])
    assert heights["_cap"] == plan.cap_bytes[0] / unit
    plan = replace(sliced_plan(), cap_bytes=(2**40,) * 2)
    axis = gantt(plan).axes[-1]
    assert "_cap" not in {line.get_label() for line in axis.lines}
    assert "1024.00 GiB" in axis.get_title(loc="left")


def test_copies_get_a_lane_of_their_own():
    plan = with_offload(sliced_plan(), chunk=0)
    timeline = simulate(plan)
    assert_drawn(gantt(plan).axes[0], "rank 0 copy", timeline.copy_start_us[0], timeline.copy_end_us[0])


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EppError, match=r"megatron-epp\[viz\]"):
        gantt(sliced_plan())


def test_plans_stand_in_the_order_given_on_the_time_axis_of_the_longest():
    short, long = sliced_plan(recompute=0), sliced_plan(recompute=4)
    figure = side_by_side([("short", short), ("long", long)])
    assert [axis.get_title(loc="left").split(":")[0] for axis in figure.axes] == ["short", "long"]
    assert {axis.get_xlim() for axis in figure.axes} == {(0.0, long.predicted.makespan_us / 1e3)}
    for axis, plan in zip(figure.axes, (short, long), strict=True):
        timeline = simulate(plan)
        assert_drawn(axis, "rank 1 compute", timeline.start_us[1], timeline.end_us[1])
        assert f"bubble {plan.predicted.bubble_fraction:.1%}" in axis.get_title(loc="left")
    without, recomputing = (axis.get_title(loc="left") for axis in figure.axes)
    assert "recompute" not in without
    assert "recompute 25.0%" in recomputing


def test_times_by_formula_are_called_uncalibrated():
    by_formula, measured = sliced_plan(), replace(sliced_plan(), costs="measured:cpu")
    assert "not calibrated" in gantt(by_formula).axes[0].get_title(loc="left")
    assert "not calibrated" not in gantt(measured).axes[0].get_title(loc="left")


def test_the_legend_has_the_colours_of_the_boxes_which_differ_in_hue_by_operation_and_are_darker_for_slices():
    axis, (legend,) = gantt(sliced_plan(slices=2, batched=2)).axes[0], gantt(sliced_plan(slices=2, batched=2)).legends
    shown = dict(zip([text.get_text() for text in legend.get_texts()], legend.get_patches(), strict=True))
    names = [f"{op}, {kind}" for op in ("forward", "backward") for kind in ("slice of a long sequence", "whole sequences")]
    assert list(shown)[:4] == names
    _, colours = bars(axis, "rank 0 compute")
    sliced, whole, backward, _ = of_boxes = [shown[name].get_facecolor() for name in names]
    assert set(of_boxes) == set(map(tuple, colours))
    assert matplotlib.colors.to_hex(sliced).upper() == operation(Op.F).colour
    assert sum(whole) > sum(sliced)
    assert backward != sliced
    (legend,) = gantt(sliced_plan(slices=2, batched=0)).legends
    assert legend.get_texts()[0].get_text() == "forward"


def test_each_rank_has_a_curve_of_memory_that_the_legend_names():
    few, many = gantt(sliced_plan(num_ranks=3)).axes[-1], gantt(sliced_plan(num_ranks=12)).axes[-1]
    assert [text.get_text() for text in few.get_legend().get_texts()] == ["rank 0", "rank 1", "rank 2"]
    assert len({line.get_color() for line in few.lines if line.get_label() != "_cap"}) == 3
    assert [text.get_text() for text in many.get_legend().get_texts()] == ["rank 0", "rank 6", "rank 11"]


def test_the_time_axis_of_a_long_iteration_is_in_seconds():
    figure = side_by_side([("long", sliced_plan(tokens=4_000_000))])
    figure.canvas.draw()
    assert figure.axes[-1].get_xlabel().startswith("s since")
    last = figure.axes[-1].get_xticklabels()[-1]
    assert float(last.get_text()) * 1e3 == pytest.approx(last.get_position()[0])
