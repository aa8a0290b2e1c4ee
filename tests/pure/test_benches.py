"""Benchmarks of plans run in their reduced form, and their figures fit together. No time is judged."""

import importlib
import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from megatron_epp.cost.work import LinearTime
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.simulation import play
from megatron_epp.planner import Options, plan
from scripts.bench.frame import Bench
from scripts.bench.noise import Ahead
from scripts.bench.orders import random_batches
from scripts.bench.orders.orders import CASES, ORDERS, TIE
from scripts.bench.orders.page import CLAIMS, claims
from scripts.bench.public.gains import BENCH as RECIPES_BENCH
from scripts.bench.public.gains import as_shipped, together
from scripts.bench.public.recipes import RECIPES
from scripts.bench.public.rows import ROWS
from scripts.bench.public.steps import LARGE, question_of, rows_of
from scripts.bench.public.steps import compared as step_of
from scripts.bench.public.steps import planned as plan_of
from scripts.bench.rivals.packing_rules import dp_balanced, dynamic_context
from scripts.bench.rl.rules import decreasing, padded
from scripts.bench.small_cases import BENCH as SMALL_CASES
from scripts.bench.small_cases import MOST_ACTIONS
from scripts.figures import Row, compared
from tests.support import ROOT
from tests.support.plan.planner_cases import least_cap_bytes, pipeline, problem
from tests.support.seeds import some_by_default

Rows = list[dict[str, Any]]
PAGE = ROOT / "docs" / "schedules.md"


def check_orders(rows: Rows) -> None:
    assert [row["order"] for row in rows] == ["interleaved, 4", "zb-v"]
    assert all(row["ratio"] == row["makespan_us"] / row["greedy_us"] >= 1 - TIE for row in rows)
    for row in rows:
        assert all(0 < row[f"{who}bubble"] < 1 and 0 < row[f"{who}peak_gib"] <= row["cap_gib"] for who in ("", "greedy_"))


def check_rl(rows: Rows) -> None:
    (row,) = rows
    (draw,) = row["draws"]
    assert draw["order"]["time_us"] <= 1.001 * draw["verl"]["time_us"]
    assert draw["recompute"]["time_us"] <= 1.001 * draw["order"]["time_us"]
    assert draw["Megatron"]["time_us"] <= draw["verl"]["time_us"]
    assert draw["Megatron"]["peak_bytes"] <= 72 << 30


def check_prefixes(rows: Rows) -> None:
    keys = [[row["ways"][way]["keys"] for way in ("gathered", "at once")] for row in rows]
    assert keys == [[5000, 3000], [8000, 6000]]


def check_rivals(rows: Rows) -> None:
    (row,) = rows
    assert row["any degree"]["us"] <= min(row[way]["us"] for way in ("dp_balanced", "dynamic CP", "verl", "slime", "NeMo-RL"))
    assert row["plans"]["us"] <= 1.005 * row["Megatron"]["us"] <= 1.005 * row["verl"]["us"]


BENCHES: dict[str, tuple[str, Callable[[Rows], None] | None]] = {
    "orders.orders": ("--reduced", check_orders), "rl.__main__": ("--reduced", check_rl),
    "exact": ("--ranks 3 --limit-s 20", None), "orders.groups": ("--reduced", None), "defaults": ("--reduced", None),
    "lockstep": ("--reduced", None), "long": ("--stages 4 --cap-gb 20 --contexts 32 64", None), "memory": ("--reduced", None),
    "planner.__main__": ("--reduced --jobs 1", None),
    "prefixes": ("--only two --heads 2 --kv-heads 1 --runs 1", check_prefixes), "noise": ("--only equal", None),
    "rivals.__main__": ("--only ' 4 GPUs'", check_rivals),
}  # fmt: skip
"""Arguments of each, and what its figures must be; what plans of the others are is tested with their planners."""


@some_by_default("name", [*BENCHES], 2)  # the others take up to a minute
def test_a_benchmark_runs_in_its_reduced_form_and_prints_its_report(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, check = BENCHES[name]
    bench: Bench[Any] = importlib.import_module(f"scripts.bench.{name}").BENCH
    assert bench.main([*shlex.split(arguments), "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"] in (printed := capsys.readouterr().out)
    assert printed.count("\n| ") >= 2 + len(report["rows"])
    if check is not None:
        check(report["rows"])


def bench_of(results: dict[str, object], **more: Any) -> Bench[Any]:
    def row(args: Any, result: Any) -> dict[str, Any]:
        if isinstance(result, Exception):
            raise result
        return args.known.get("first") or {"result": result}

    text = lambda args, rows: " ".join(str(row.get("result", row.get("failed"))) for row in rows)  # noqa: E731
    return Bench(about="", cases=lambda args: results, row=row, text=text, **more)


def test_a_page_has_the_figures_of_the_rows_that_a_command_prints_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("| a | code | 1.24 s |", "| a | chats | 27.56 s |", "| b | code | 3.00 s |", "| b | chats | 8.44 s |")
    monkeypatch.setattr("scripts.figures.printed", lambda *command: lines)
    assert list(compared(Row("a page", ("models", ""), ("b", "3.0, 8.44 s"), 1))) == [("3.0", True), ("8.44", True)]
    assert list(compared(Row("a page", ("models", ""), ("b", "27.56, 8.44 s"), 1))) == [("27.56", False), ("8.44", True)]


def test_the_frame_goes_on_when_a_case_fails_takes_some_cases_alone_and_resumes(tmp_path: Path, capsys) -> None:
    cases = {"first": 1, "second": ValueError("no"), "third": 3}
    assert bench_of(cases, goes_on=True).main([]) == 1
    assert capsys.readouterr().out.endswith("\n1 ValueError: no 3\n")
    assert bench_of(cases).main(["--only", "fir,third"]) == 0
    assert capsys.readouterr().out.endswith("\n1 3\n")
    with pytest.raises(SystemExit, match="there are first, second, third"):
        bench_of(cases).main(["--only", "fourth"])
    with pytest.raises(ValueError, match="no"):
        bench_of(cases).main([])
    file = str(tmp_path / "rows.json")
    assert bench_of({"first": 1}, resumes=True).main(["--json", file]) == 0
    assert bench_of({"second": 2}, resumes=True).main(["--json", file]) == 0
    assert [row["case"] for row in json.loads(Path(file).read_text())["rows"]] == ["first", "second"]


def test_greedy_is_no_faster_than_the_best_plan_and_a_seed_is_solved_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("ortools", reason="the solver needs OR-tools: pip install 'megatron-epp[milp]'")
    asked = ["--limit-s", "20", "--json", str(tmp_path / "found.json"), "--seeds"]
    assert SMALL_CASES.main([*asked, "5:6"]) == 0
    before = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert SMALL_CASES.main([*asked, "5:7"]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [5, 6]
    assert rows[0]["solved_s"] == before[0]["solved_s"]
    for row in rows:
        assert row["greedy_us"] >= row["best_us"] * (1 - 1e-9) >= row["bound_us"] * (1 - 1e-9) > 0
        assert row["chunks"] * row["stages"] // row["ranks"] * (3 if row["split_weight"] else 2) <= MOST_ACTIONS
    assert "2 cases" in capsys.readouterr().out


def test_the_page_of_schedules_has_what_papers_claim_and_what_ours_do_now():
    orders = {name for name, entry in PLANNERS.entries().items() if entry.fixed is not None}
    assert set(CLAIMS) == orders, "`CLAIMS` of scripts/bench/orders/page.py has a row for every order"
    assert claims() in PAGE.read_text()


def test_the_table_of_plans_has_every_case_and_order():
    """Their figures take long, so only names are looked at."""
    page = PAGE.read_text()
    planned = page[page.index("## On three batches") : page.index("## HelixPipe")]
    (makespans,) = re.findall(r"(?m)(?:^\|.*\n)+", planned)
    cases = [f"{case.name}, {case.cap_gib} GiB" for case in CASES]
    assert makespans.splitlines()[0] == "| " + " | ".join(["schedule", *cases]) + " |"
    rows = sorted(re.findall(r"(?m)^\| `(.+?)` \|", makespans))
    assert rows == sorted(ORDERS), "python -m scripts.bench.orders --only NAME --json FILE has the figures of an order's row"


ONCE_FASTER = [(0, "interleaved, 4"), (91, "hanayo"), (29, "slimpipe"), (71, "hanayo")]
FASTER = {
    (48, "interleaved, 4"): "2.4 % faster; one of 2,400 recipes beats it: a walk along grain and cut together would come by it",
    (97, "slimpipe"): "1.1 % faster; no recipe is as fast, the best of 2,400 is 1.0 % slower",
}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "order"), FASTER)
def test_an_order_that_is_faster_than_greedy_is_known(seed: int, order: str):
    row = random_batches.ratios(seed, [order])["orders"][order]
    assert row["makespan_us"] < (1 - TIE) * row["greedy_us"], f"greedy has learnt: {FASTER[seed, order]}"


@some_by_default(("seed", "order"), ONCE_FASTER, 2)
def test_greedy_has_learnt_from_orders_that_were_faster(seed: int, order: str):
    """Any number of coarse chunks, one warm-up for all ranks, narrow windows for grains that are nearly the best, and slices of
    equal length.
    """
    row = random_batches.ratios(seed, [order])["orders"][order]
    assert row["makespan_us"] >= (1 - TIE) * row["greedy_us"] > 0


MANY_STAGES = {"1", "2", "3"}
"""Rows whose plans of 128 stages take several seconds each."""


def number_of(row):
    return row.number.split(",")[0]


@pytest.mark.parametrize("number", ["3", "5", "8", "9", "13, 4 slices"])
def test_microbatches_are_those_of_the_measured_run(number):
    row = next(row for row in ROWS if row.number == number)
    made = plan_of(row, question_of(row), LinearTime())
    whole = row.per_chunk if row.slices <= 1 else 1
    assert {len(chunk.segments) for chunk in made.chunks} == {whole}
    assert len(made.chunks) == max(1, row.slices) * row.sequences // (row.config.data * row.per_chunk)


@pytest.fixture(scope="module")
def steps():
    return [step_of(row) for row in ROWS if number_of(row) not in MANY_STAGES]


def test_plans_are_within_a_tenth_of_most_measurements_and_a_large_error_has_its_reason(steps):
    errors = {step.row.number: abs(step.error) for step in steps}
    assert median(errors.values()) <= 0.1, errors
    assert {number.split(",")[0] for number, error in errors.items() if error > LARGE} <= {"16", "17", "18"}, errors
    text = list(rows_of(steps))
    assert len(text) == len(steps) + 2
    for line, step in zip(text[1:], steps, strict=False):
        assert line.startswith(step.row.number)
        assert f"{step.planned_s:.2f} s" in line
        assert ("with a slow host" in line) == (abs(step.error) > LARGE)


@pytest.mark.slow  # plans of 128 stages
def test_plans_of_many_stages_are_within_a_tenth():
    errors = {row.number: step_of(row).error for row in ROWS if number_of(row) in MANY_STAGES}
    assert max(map(abs, errors.values())) <= 0.1, errors


def recipe_of(name):
    return next(recipe for recipe in RECIPES if recipe.name == name)


@some_by_default("name", ["dapo-7b", "32b-sft"], 1)
def test_a_recipe_is_planned_as_it_ships_with_megatrons_flags_at_their_best_and_by_plans(name, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert RECIPES_BENCH.main(["--only", name, "--no-advice", "--json", str(file)]) == 0
    (figures,) = json.loads(file.read_text())["rows"]
    shipped, repacked, stock, same = (figures[way] for way in ("shipped", "repacked", "stock", "same"))
    assert stock["seconds"] <= repacked["seconds"] <= shipped["seconds"]
    assert stock["peak_bytes"] <= figures["cap_bytes"]
    assert same["peak_bytes"] <= figures["cap_bytes"]
    assert same["sizes"].partition(" VPP")[0] == stock["sizes"].partition(" VPP")[0] == shipped["sizes"]
    assert figures["times_same"] == pytest.approx(stock["seconds"] / same["seconds"])
    assert math.prod(figures["causes"][2:]) == pytest.approx(figures["times_same"])
    assert (figures["advised"], figures["causes_advised"]) == (None, [])
    printed = capsys.readouterr().out
    assert f"{same['seconds']:.4g} s" in printed
    assert recipe_of(name).commit in printed


def test_recompute_of_every_layer_takes_a_recipe_longer_and_less_memory():
    recipe = recipe_of("32b-sft")
    every = as_shipped(recipe, recipe.rule, recipe.budget)
    none = as_shipped(replace(recipe, recomputes_all=False), recipe.rule, recipe.budget)
    assert none.seconds < every.seconds
    assert every.peak_bytes < none.peak_bytes


def test_replicas_that_share_experts_wait_for_the_longest_of_their_microbatches():
    assert together([[[8], [1, 1]], [[4, 3], [6], [2]]]) == [[8], [6], [2]]


def test_rules_fill_microbatches_up_to_the_budget_or_pad_every_sequence_to_it():
    assert decreasing([3, 7, 2, 5], 9) == [[7, 2], [5, 3]]
    assert padded([3, 9], 9) == [[3, 6], [9]]


LENGTHS = [120, 900, 30, 450, 16, 4000, 700, 64, 2100, 320]


@pytest.mark.parametrize("rank_tokens", [500, 700, 4000])
def test_groups_of_dynamic_context_parallelism_use_all_ranks_and_have_room_for_their_sequences(rank_tokens):
    microbatches = dynamic_context(LENGTHS, 8, rank_tokens)
    assert sorted(q for groups in microbatches for group in groups for q in group.sequences) == [*range(len(LENGTHS))]
    for groups in microbatches:
        assert sum(group.degree for group in groups) == 8
        assert all(sum(LENGTHS[q] for q in group.sequences) <= group.degree * rank_tokens for group in groups)


def test_dp_balanced_fills_rows_in_the_order_of_the_data_and_gives_each_replica_as_many():
    assert dp_balanced([3, 7, 2, 5, 1], 9, 2) == [[[3], [5]], [[7, 2], [1]]]
    assert dp_balanced([3, 6, 2, 5, 1], 9, 2) == [[[3, 6]], [[2, 5, 1]]]
    assert dp_balanced([4, 2], 9, 4) is None


@pytest.mark.parametrize("ahead", [0, 64])
def test_a_rank_that_runs_ready_passes_ahead_keeps_its_cap_and_none_ahead_is_the_simulated_order(ahead):
    asked, costs = problem((900, 400, 300, 200, 100, 60, 30), 4), pipeline(4, 2)
    made = plan(replace(asked, cap_bytes=(least_cap_bytes(asked, costs, Options()) * 103 // 100,) * 4), costs)
    graph = build_graph(made)
    noisy = replace(graph, columns=replace(graph.columns, time_us=graph.columns.time_us[::-1].copy()))
    ran = Ahead(noisy, made, ahead)
    makespan_us, order = ran.run(), ran.order
    if not ahead:
        assert makespan_us == pytest.approx(max(play(noisy).end_us))
        assert order == [[*numbers] for numbers in graph.tracks[:4]]
    for numbers, static, cap in zip(order, made.static_bytes, made.cap_bytes, strict=True):
        live = [0, *accumulate((graph.columns.alloc_bytes - graph.columns.free_bytes)[numbers].tolist())]
        peaks = [before + int(graph.columns.alloc_bytes[number]) for before, number in zip(live, numbers, strict=False)]
        assert static + max(peaks) <= cap
