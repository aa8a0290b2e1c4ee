"""Plans as text and in tables."""

from dataclasses import replace

import pytest

from megatron_epp.plan.action import Action
from megatron_epp.plan.plan import UNLIMITED_BYTES
from megatron_epp.plan.serialize import digest
from megatron_epp.plan.units import format_bytes
from megatron_epp.report.text import (
    against,
    bubble_fraction,
    clip,
    comparison,
    format_cap,
    format_us,
    recompute_in_backward,
    recompute_share,
    summary,
)
from tests.support.plan.report_plans import measured_run, predicted, sliced_plan, with_offload

SMALL = """\
6 sequences of 500 to 2,000 tokens, 4,500 in all, in 4 chunks (1 split, 1 hybrid, 2 batched)
makespan 19.54 ms (33.6% above the lower bound), bubble 25.2%, recompute 7.7%, peak 4.42 MiB of 16.00 MiB
recompute takes 2.25 ms of all ranks' time: 8 full of 32 layer passes

chunk  kind     tokens  segments
    0  split     1,000  0[0:1000]
    1  hybrid    1,500  0[1000:2000] 1
    2  batched   1,000  2 3
    3  batched   1,000  4 5

rank  stages      busy  bubble  peak MiB        cap  recompute layers
   0       0  14.62 ms   25.2%      4.42  16.00 MiB              4/16
   1       1  14.62 ms   25.2%      3.44  16.00 MiB              4/16

rank 0 | 0F0 0F1 0F2 0B1 0F3 0B0 0B2 0B3
rank 1 | 1F0 1F1 1B1 1F2 1B0 1F3 1B2 1B3"""


def test_a_small_plan_prints_whole():
    plan = sliced_plan()
    first, rest = summary(plan).split("\n", 1)
    assert first == f"plan {digest(plan)[:12]}: planner greedy, costs analytic, 2 stages on 2 ranks, 8 layers"
    assert rest == SMALL


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


def test_the_planners_notes_are_printed():
    assert "note: dropped nothing" in summary(replace(sliced_plan(), notes=("dropped nothing",)))


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


def test_bubbles_of_the_ranks_average_to_the_plans():
    plan = sliced_plan(num_ranks=4, batched=5)
    shares = [bubble_fraction(plan, rank) for rank in range(4)]
    assert sum(shares) / 4 == pytest.approx(plan.predicted.bubble_fraction)


def test_plans_compare_in_one_table_with_the_best_at_one():
    lean, full = sliced_plan(recompute=0), sliced_plan(recompute=4)
    lines = comparison([("lean", lean), ("full", full)]).splitlines()
    ratio = full.predicted.makespan_us / lean.predicted.makespan_us
    assert lines[0].split() == ["plan", "makespan", "x", "best", "bubble", "peak", "cap", "recompute", "chunks"]
    assert lines[1].split()[:5] == [
        "lean",
        f"{lean.predicted.makespan_us / 1e3:.2f}",
        "ms",
        "1.000",
        f"{lean.predicted.bubble_fraction:.1%}",
    ]
    assert lines[2].split()[3] == f"{ratio:.3f}"
    assert lines[1].split()[-2:] == ["0.0%", "4"]
    assert lines[2].split()[-2:] == ["25.0%", "4"]


def test_a_run_twice_as_slow_shows_as_such():
    plan = sliced_plan(num_ranks=1)
    rows = {line.split("  ")[0]: line.split()[-1] for line in against(plan, measured_run(plan, slowdown=2.0)).splitlines()}
    assert rows["makespan"] == rows["all F"] == rows["all B"] == "2.000"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0.00 B"),
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(80 * 2**30), "80.00 GiB"),
        (format_cap(UNLIMITED_BYTES), "unlimited"),
        (format_cap(80 * 2**30), "80.00 GiB"),
        (format_us(812.5), "812.5 us"),
        (format_us(12345.6), "12.35 ms"),
        (format_us(3.21e6), "3.210 s"),
        (clip("abcdef", 4), "abc…"),
        (clip("abcd", 4), "abcd"),
        (clip("abcdef", None), "abcdef"),
    ],
)
def test_numbers_read_well(text, expected):
    assert text == expected
