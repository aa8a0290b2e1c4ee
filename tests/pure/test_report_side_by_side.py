"""Plans of one batch below each other, looked at through matplotlib's objects."""

import numpy as np
import pytest

from megatron_epp.cli.main import main
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.gantt import side_by_side
from tests.support.plan.report_plans import sliced_plan, v_shaped_plan

SMALL = ["--stages", "2", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "4"]


def bars(axis, label):
    found = next(c for c in axis.collections if c.get_label() == f"_{label}")
    return np.array([(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in found.get_paths()])


def test_plans_stand_in_the_order_given_on_the_time_axis_of_the_longest():
    short, long = sliced_plan(recompute=0), sliced_plan(recompute=4)
    figure = side_by_side([("short", short), ("long", long)])
    assert [axis.get_title(loc="left").split(":")[0] for axis in figure.axes] == ["short", "long"]
    assert {axis.get_xlim() for axis in figure.axes} == {(0.0, long.predicted.makespan_us / 1e3)}
    for axis, plan in zip(figure.axes, (short, long), strict=True):
        timeline = simulate(plan)
        drawn = bars(axis, "rank 1 compute")
        np.testing.assert_allclose(drawn, np.array([timeline.start_us[1], timeline.end_us[1]]).T / 1e3)
        assert f"bubble {plan.predicted.bubble_fraction:.1%}" in axis.get_title(loc="left")


def test_only_a_plan_that_recomputes_says_so():
    first, second = side_by_side([("none", sliced_plan(recompute=0)), ("all", sliced_plan(recompute=4))]).axes
    assert "recompute" not in first.get_title(loc="left")
    assert "recompute 25.0%" in second.get_title(loc="left")


def test_pipelines_are_described_once_or_where_they_differ_in_every_title():
    equal_stages = side_by_side([("one", sliced_plan()), ("two", sliced_plan())])
    assert "2 stages on 2 ranks" in equal_stages.get_suptitle()
    differing = side_by_side([("one", sliced_plan()), ("v", v_shaped_plan())])
    assert "stages" not in differing.get_suptitle()
    titles = [axis.get_title(loc="left") for axis in differing.axes]
    assert [title.split(", ")[-1] for title in titles] == ["2 stages on 2 ranks", "4 stages on 2 ranks"]


def test_the_legend_names_the_operations_of_all_plans():
    figure = side_by_side([("one", sliced_plan(recompute=0)), ("two", sliced_plan(recompute=1)), ("v", v_shaped_plan())])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name.partition(",")[0] for name in names[:4]] == ["forward", "forward", "backward", "backward"]
    assert "recompute inside a backward" in names
    alone = side_by_side([("one", sliced_plan(recompute=0))])
    assert "recompute inside a backward" not in [text.get_text() for text in alone.legends[0].get_texts()]


def test_the_time_axis_of_a_long_iteration_is_in_seconds():
    figure = side_by_side([("long", sliced_plan(tokens=4_000_000))])
    figure.canvas.draw()
    assert figure.axes[-1].get_xlabel().startswith("s since")
    last = figure.axes[-1].get_xticklabels()[-1]
    assert float(last.get_text()) * 1e3 == pytest.approx(last.get_position()[0])


def test_nothing_to_draw_is_told():
    with pytest.raises(PlanError, match="no planner found one"):
        side_by_side([])


def test_compare_draws_the_plans_that_there_are(tmp_path, capsys):
    picture = tmp_path / "compared.png"
    argv = ["compare", "--lengths", "900,50", "--planner", "greedy", "--planner", "1f1b", *SMALL, "-o", str(picture)]
    assert main(argv) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--lengths", "70"]) == 2
    assert "give --lengths once" in capsys.readouterr().err
