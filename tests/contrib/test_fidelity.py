"""Where a run went off its plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.contrib.demos.fidelity import RECOMPUTING, compare, traces
from megatron_epp.plan import NO_RECOMPUTE, Recompute
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Messages
from megatron_epp.plan.serialize import to_json
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Measured
from tests.support.plan.report_plans import measured_run, sliced_plan


def with_processor_time(measured: Measured, share: float) -> Measured:
    """The same run, in which every action had its core for a share of its time."""
    return replace(measured, ranks=tuple(tuple(e._replace(cpu_us=share * e.took_us) for e in row) for row in measured.ranks))


def delayed(measured: Measured, late_us: float) -> Measured:
    """The same run, of which everything happened later."""
    rows = (tuple(e._replace(start_us=e.start_us + late_us, end_us=e.end_us + late_us) for e in row) for row in measured.ranks)
    return replace(measured, ranks=tuple(rows))


def test_a_run_as_planned_has_no_error():
    plan = sliced_plan(num_ranks=3)
    found = compare(plan, measured_run(plan, slowdown=1.0))
    assert found.error == found.planned_us / found.replayed_us - 1 == 0.0
    assert found.planned_us == simulate(plan).makespan_us
    assert found.undisturbed_us is None
    assert found.taken_us == 0.0


def test_slow_actions_show_in_the_replay_and_late_ones_between_it_and_the_run():
    plan = sliced_plan(num_ranks=3)
    slow = compare(plan, delayed(measured_run(plan, slowdown=1.25), 70.0))
    assert slow.replayed_us == pytest.approx(compare(plan, measured_run(plan, slowdown=1.25)).measured_us)
    assert slow.measured_us == pytest.approx(slow.replayed_us + 70.0)
    for took in slow.kinds.values():
        assert took.measured_us == pytest.approx(1.25 * took.planned_us)


def test_what_others_took_is_told_apart_by_processor_time():
    plan = sliced_plan(num_ranks=3)
    at_once = ((0.0,) * len(plan.chunks),) * 2
    plan = replace(plan, messages=Messages(at_once, at_once))
    found = compare(plan, with_processor_time(measured_run(plan, slowdown=1.25), 0.8))
    assert found.error == pytest.approx(-0.2)
    assert found.undisturbed_us == pytest.approx(found.planned_us)
    assert found.taken_us == pytest.approx(0.2 * found.measured_us)
    for took in found.kinds.values():
        assert took.cpu_us == pytest.approx(0.8 * took.measured_us, rel=1e-12)


def test_the_iterations_of_a_run_are_those_of_its_folder(tmp_path: Path):
    plans = [sliced_plan(num_ranks=2), sliced_plan(num_ranks=2, batched=3)]
    runs = [(plan, measured_run(plan)) for plan in plans]
    for number, (plan, measured) in enumerate(runs, start=1):
        (tmp_path / f"plan-{number}.json").write_text(to_json(plan))
        (tmp_path / f"measured-{number}.json").write_text(measured.to_json())
    assert traces(tmp_path, 2) == runs


def test_backwards_that_recompute_are_a_kind_of_their_own():
    plan = sliced_plan(num_ranks=2)
    rows = [list(row) for row in plan.recompute]
    rows[1] = [NO_RECOMPUTE] * len(rows[1])
    rows[0] = [Recompute(1), *[NO_RECOMPUTE] * (len(rows[0]) - 1)]
    plan = replace(plan, recompute=tuple(map(tuple, rows)))
    kinds = compare(plan, measured_run(plan)).kinds
    assert set(kinds) == {"F", "B", RECOMPUTING}
    assert (kinds[RECOMPUTING].count, kinds["F"].count) == (1, 2 * len(plan.chunks))
    assert kinds["B"].count == 2 * len(plan.chunks) - 1


def test_a_measurement_of_another_plan_is_refused_by_the_action_it_lacks():
    small, large = sliced_plan(num_ranks=2), sliced_plan(num_ranks=2, batched=3)
    assert len(large.chunks) > len(small.chunks)
    with pytest.raises(PlanError, match=f"has no 0[FB]{len(small.chunks)}"):
        compare(large, measured_run(small))
