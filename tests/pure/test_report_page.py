"""The data of a page are those of the simulator and of the run, and the page is one file that needs nothing else."""

import json
import re
from dataclasses import replace
from itertools import accumulate

import pytest

from megatron_epp.cli.main import main
from megatron_epp.plan.action import Action
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.operations import operations
from megatron_epp.plan.plan import UNLIMITED_BYTES
from megatron_epp.plan.serialize import save
from megatron_epp.plan.simulate import simulate
from megatron_epp.planner import plan as plan_batch
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.report.gantt import memory_picture, side_by_side
from megatron_epp.report.page.data import Shown, item_columns, plan_columns
from megatron_epp.report.page.html import embedded, page, save_page
from megatron_epp.report.plan_figures import recompute_in_backward
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.plan.report_plans import measured_run, sliced_plan, v_shaped_plan, with_offload

SMALL = ["--stages", "2", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "4"]
OPS = [each.op for each in operations()]


def data_of(text):
    """Return the data that a browser reads from a page."""
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
    assert max(ends) == ends[path[-1]]
    assert set(columns["transfers"]) == {"activation", "gradient"}


def test_recompute_has_its_share_of_the_backward_and_its_modes():
    plan = sliced_plan(recompute=2)
    columns = plan_columns(Shown("p", plan))["planned"]
    shares = recompute_in_backward(plan)
    again = columns["recompute"]
    times = zip(again["box"], again["time_us"], strict=True)
    found = {actions_of(columns)[box]: time_us / columns["time_us"][box] for box, time_us in times}
    assert found == pytest.approx(shares)
    assert again["modes"] == [str(plan.recompute[0][0])]


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
    plan = replace(sliced_plan(), notes=(bad,), planner=bad, costs=bad)
    text = page([Shown(bad, plan)])
    assert text.count("</script") == page([Shown("p", sliced_plan())]).count("</script")
    assert bad not in text
    assert data_of(text)["plans"][0]["name"] == bad
    assert json.loads(embedded([bad])) == [bad]


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


# ---- memory by items, on a page and as a picture ---------------------------------------------------------------------


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
