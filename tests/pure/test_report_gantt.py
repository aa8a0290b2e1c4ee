"""Gantt pictures, looked at through matplotlib's objects."""

import sys
from dataclasses import fields, replace

import matplotlib.colors
import numpy as np
import pytest

from megatron_epp.cost.memory import DYNAMIC, LOSS_BLOCK, MESSAGES, WORKING, Static
from megatron_epp.plan.action import Op
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.memory_breakdown import MemoryBreakdown
from megatron_epp.plan.operations import operation
from megatron_epp.plan.simulation import simulate
from megatron_epp.tools.report.gantt import gantt, item_colours, side_by_side
from tests.support.plan.report_plans import measured_run, sliced_plan, with_offload


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
