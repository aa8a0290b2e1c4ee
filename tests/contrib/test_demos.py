"""Demonstrations measure in alternating rounds, say where a run went off its plan, and print verdicts from figures."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.contrib.demos.fidelity import RECOMPUTING, compare, traces
from megatron_epp.contrib.demos.quickstart.parts import LongDocument, Parity, Schedule, SkewedDocuments
from megatron_epp.contrib.demos.quickstart.texts import figures, long_lines, parity_lines, ratios, skewed_lines, summary
from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, ProcessorTime, Rounds, doubt, turns
from megatron_epp.launch.runs import RecordedRun
from megatron_epp.plan import NO_RECOMPUTE, Recompute
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Messages
from megatron_epp.plan.serialize import to_json
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Measured
from tests.support.plan.report_plans import measured_run, sliced_plan

FAST, SLOW = Rounds((10.0, 9.0, 12.0)), Rounds((20.0, 19.0, 25.0))


def test_a_figure_has_a_median_a_range_and_a_spread():
    assert (FAST.median, FAST.range) == (10.0, (9.0, 12.0))
    assert FAST.spread == pytest.approx(0.3)


def test_every_round_has_each_name_once_and_begins_with_another():
    assert list(turns("abc", 4)) == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "quiet", "busy"),
    [(2, 2, 0.19, 0.21), (8, 2, 0.19, 0.21), (2, 64, 62.1, 62.3), (16, 16, 1.5, 1.7)],
)
def test_a_machine_is_busy_where_others_take_more_than_spare_cores_and_a_tenth_of_the_ranks(num_ranks, num_cores, quiet, busy):
    assert not Occupancy(quiet, num_ranks, num_cores).is_busy
    assert Occupancy(busy, num_ranks, num_cores).is_busy
    assert not Occupancy(None, num_ranks, num_cores).is_busy


def test_a_difference_is_doubted_where_the_machine_was_busy_or_ranges_overlap():
    quiet, busy = (Occupancy(others, num_ranks=2, num_cores=2) for others in (0.1, 1.0))
    assert doubt(FAST, SLOW, quiet) == doubt(FAST, SLOW, Occupancy(None, num_ranks=2, num_cores=2)) == ""
    assert "(other programs took 1.0 of 2 cores)" in doubt(FAST, SLOW, busy)
    assert "overlap" in doubt(FAST, Rounds((12.0, 30.0)), quiet)
    assert "one round" in doubt(FAST, Rounds((30.0,)), quiet)


TICKS = os.sysconf("SC_CLK_TCK")
STOLEN_ONLY = "cpu  0 0 0 900 9 0 0 50 0 0\n"


def system(folder: Path, stat: str, **processes: tuple[int, int, str]) -> Path:
    """Write the files of a system.

    Args:
        processes: by ``p`` and the number: parent, ticks of its own, and its name. Each has a tick of ended children.
    """
    (folder / "stat").write_text(stat)
    for process, (parent, ticks, name) in processes.items():
        (folder / process[1:]).mkdir()
        fields = ["S", parent, *[0] * 9, ticks - 1, 1, 1, 0, *[7] * 37]
        (folder / process[1:] / "stat").write_text(f"{process[1:]} ({name}) {' '.join(map(str, fields))}\n")
    return folder


def test_time_of_all_programs_counts_everything_but_idle_cores(tmp_path):
    folder = system(tmp_path, "cpu  10 20 30 9000 900 40 50 60 5 5\ncpu0 1 1 1 1\n")
    assert ProcessorTime.read(folder).all_s == pytest.approx(210 / TICKS)


def test_own_time_is_that_of_this_process_and_of_all_below_it(tmp_path):
    own = {f"p{os.getpid()}": (1, 100, "python"), "p7": (os.getpid(), 10, "a rank) S 1 (x"), "p8": (7, 5, "planner")}
    found = ProcessorTime.read(system(tmp_path, STOLEN_ONLY, p1=(0, 7000, "init"), p9=(1, 800, "others"), **own))
    assert found.own_s == pytest.approx((100 + 10 + 5 + 3) / TICKS)
    assert found.all_s == pytest.approx(50 / TICKS)


@pytest.mark.parametrize("stat", [None, "", "cpu  0 0 0 0 0 0 0 0 0 0\n", "intr 5\n"])
def test_a_system_that_does_not_tell_has_no_figures(tmp_path, stat):
    folder = tmp_path if stat is None else system(tmp_path, stat)
    assert ProcessorTime.read(folder) is None


def test_what_this_program_uses_is_not_that_of_others():
    before, after = ProcessorTime(10.0, 500.0, 40.0), ProcessorTime(20.0, 518.0, 57.0)
    assert after.cores_of_others_since(before) == pytest.approx(0.1)
    assert ProcessorTime(20.0, 517.0, 57.5).cores_of_others_since(before) == 0.0


@pytest.mark.skipif(ProcessorTime.read() is None, reason="needs /proc/stat of Linux with figures")
def test_time_of_a_process_that_this_one_started_is_its_own_and_stays_so_when_it_has_ended():
    before = ProcessorTime.read()
    work = "import time\nwhile time.process_time() < 0.3: pass"
    others = OthersMeter()
    with others.measured():
        subprocess.run([sys.executable, "-c", work], check=True)
    assert ProcessorTime.read().own_s - before.own_s >= 0.3 - 2 / TICKS
    occupancy = others.occupancy(num_ranks=1)
    assert 0.0 <= occupancy.others <= occupancy.num_cores
    assert (occupancy.num_ranks, occupancy.num_cores) == (1, os.cpu_count())


def test_without_a_measurement_the_load_of_others_is_unknown():
    assert OthersMeter().occupancy(num_ranks=2).others is None


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


MIB = 1 << 20
PARITY = Parity(((5.5, 5.5), (5.0, 5.00005)), 2e-7)
QUIET = Occupancy(0.1, num_ranks=2, num_cores=2)
WHOLE = Schedule(Rounds((9_000.0, 10_000.0, 11_000.0)), 137 * MIB, 4.5e6, 4.2e6, (5.8, 5.7))
ELASTIC = Schedule(Rounds((14_000.0, 13_000.0, 15_000.0)), 116 * MIB, 3.0e6, 3.0e6, (5.8, 5.7))
SKEWED = SkewedDocuments(WHOLE, ELASTIC, QUIET, 123 * MIB)
LONG = LongDocument((8192, 90, 80), 116 * MIB, 52 * MIB, 46 * MIB, 47 * MIB, 51 * MIB, ((5.0, 5.0),), sliced_plan(num_ranks=2))


def said() -> str:
    return "\n".join(summary(PARITY, SKEWED, LONG))


def test_a_run_has_the_rate_of_its_iterations_after_the_first_two_and_the_highest_peak_of_every_rank():
    lines = tuple({"loss": 4.0 - i, "tokens": 100, "peak_activation_bytes": [3 + i, 5 - i]} for i in range(4))
    run = RecordedRun(lines, (50.0, 50.0, 20.0, 5.0))
    assert run.tokens_per_second == pytest.approx(200 / 0.025)
    assert RecordedRun(lines[:1], (50.0,)).tokens_per_second == 2_000
    assert run.peak_activation_bytes == [6, 5]
    assert run.losses == [4.0, 3.0, 2.0, 1.0]


def test_ratios_are_planned_measured_and_by_processor_time():
    assert ratios(SKEWED) == pytest.approx({"planned": 1.5, "measured": 1.4, "by_processor_time": 1.4})
    assert ratios(replace(SKEWED, whole=replace(WHOLE, own_us=None)))["by_processor_time"] is None


def test_the_planned_ratio_is_beside_the_measured_one_and_losses_side_by_side():
    shown = skewed_lines(SKEWED)
    assert "elastic plans train 1.40 times as fast, 1.50 planned, 1.40 by processor time alone" in shown
    assert ["1", "5.8000000", "5.8000000", "0.0e+00"] in [line.split() for line in shown]
    assert "1F1B, whole documents    10,000   9,000  11,000     20%        137.00 MiB" in shown
    doubted = "\n".join(skewed_lines(replace(SKEWED, occupancy=replace(QUIET, others=1.0))))
    assert "inconclusive: the machine was busy (other programs took 1.0 of 2 cores): " in doubted


def test_losses_a_long_documents_peaks_and_where_it_would_tie_are_told():
    assert parity_lines(PARITY)[-1].endswith("differs by at most 2.0e-07 of its norm")
    assert "losses are equal within 1e-05, gradients equal within 2e-07" in said()
    shown = "\n".join(long_lines(LONG))
    assert "they need 51.00 MiB at least" in shown
    assert "would run whole documents" in "\n".join(long_lines(replace(LONG, needed_bytes=None)))
    assert "8,192 tokens among 2 short ones: whole documents take 52.00 MiB" in said()
    assert "Elastic plans trained them in 46.00 MiB; losses are equal." in said()
    assert "a tie where documents have similar lengths" in said()


def test_the_report_has_every_figure():
    report = figures(PARITY, SKEWED, LONG)
    assert report["parity"]["max_relative_loss_difference"] == pytest.approx(1e-5)
    assert report["skewed"]["schedules"]["elastic plans"]["tokens_per_second"] == (14_000.0, 13_000.0, 15_000.0)
    assert report["skewed"]["occupancy"] == {"others": 0.1, "num_ranks": 2, "num_cores": 2}
    assert report["skewed"]["elastic_over_whole"]["measured"] == pytest.approx(1.4)
    assert report["long_document"]["elastic_bytes"] == 46 * MIB
