"""The memory of a plan as figures and as a picture, against the simulator's bytes."""

from __future__ import annotations

import pytest

from megatron_epp.planner import plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.report.gantt import memory_picture, save_picture
from megatron_epp.report.page.data import item_columns
from megatron_epp.report.text import main_items, memory_figures
from tests.support.plan.planner_cases import pipeline, problem


@pytest.fixture(scope="module")
def breakdown():
    costs, asked = pipeline(2), problem((8192, 700, 300), 2, 64 << 30)
    return memory_breakdown(plan(asked, costs), costs)


def test_every_rank_has_its_peak_in_items_that_add_up_and_what_is_left_of_its_cap(breakdown):
    made = breakdown.timeline.plan
    for rank, found in enumerate(memory_figures(breakdown)):
        assert (found["rank"], found["stages"]) == (rank, [rank])
        assert found["peak_bytes"] == breakdown.timeline.peak_bytes[rank] == sum(found["peak"].values())
        assert found["static_bytes"] == made.static_bytes[rank] == sum(found["static"].values())
        assert found["headroom_bytes"] == (64 << 30) - found["peak_bytes"]
        assert max(num_bytes for _, num_bytes in found["live_bytes"]) == found["peak_bytes"]
        assert found["host_peak_bytes"] == 0
        assert found["peak_action"] in {str(action) for action in made.actions(rank)}
        assert 0 <= found["peak_us"] <= breakdown.timeline.makespan_us


def test_the_largest_items_are_told_first():
    items = {"few": 1 << 30, "most": 4 << 30, "least": 1 << 20, "some": 2 << 30}
    assert main_items(items) == "4.00 GiB most, 2.00 GiB some, 1.00 GiB few"


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


def test_the_picture_is_written_in_the_format_of_its_suffix(breakdown, tmp_path):
    save_picture(memory_picture(breakdown), tmp_path / "memory.svg")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_the_items_of_a_page_add_up_to_the_live_bytes(breakdown):
    columns = item_columns(breakdown)
    assert columns["names"] == list(breakdown.items)
    for rank, row in enumerate(columns["ranks"]):
        changes = list(zip(*[iter(row["changes"])] * 3, strict=True))
        sums = [sum(delta for moment, _, delta in changes if moment <= at) for at in range(len(row["time_us"]))]
        assert sums == [num_bytes for _, num_bytes in breakdown.timeline.live_bytes(rank)]
