"""Training with plans gives what Megatron's own schedule gives on the same documents fed whole: fp32, on CPU, over gloo.

"Stock" is Megatron's schedule function and Megatron's attention, one document per microbatch. ``scripts/parity`` runs and
compares everything: cuts of the documents for five iterations on few processes, and for two a matrix of parallel sizes on
four processes in which every two kinds of parallelism meet. The set `slow` has more cuts of every model for twenty, the rows on
up to eight in which every two choices meet, of placements, models, plans and optimizers too, and every cell.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from scripts.parity.cells import Cell, Row, all_cells, all_rows, covering_rows, full_rows
from scripts.parity.compare import BATCH
from tests.support.mcore.forked import launch
from tests.support.mcore.launch import run
from tests.support.mcore.parity_cases import (
    ALL_STATISTICS,
    CASES,
    CUTS,
    ITERATIONS,
    LEARNED,
    MORE_CASES,
    MORE_ITERATIONS,
    Cases,
)
from tests.support.mcore.parity_figures import SMALL_BATCH, Figures, check_closeness, parity_of


def meetings(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Every two kinds of parallelism that meet in a row; tensor parallelism with and without shared tokens are two kinds."""
    found: set[tuple[str, str]] = set()
    for cell in (row.cell for row in rows):
        sizes = {"tp": cell.tp if not cell.sp else 1, "sp": 1 + cell.sp, "cp": cell.cp, "dp": cell.dp, "pp": cell.pp}
        sizes |= {cell.placement: cell.virtual, "split": 1 + cell.split, "experts": 1 + cell.experts, "ep": cell.ep}
        found |= set(combinations(sorted(kind for kind, size in sizes.items() if size > 1), 2))
    return found


BY_DEFAULT = (
    "dp2 pp2 looped2 split experts4 ep2: gpt2, packed, overlapped",
    "cp2 pp2 v2 split experts4: llama, recompute, distributed",
    "tp2 sp pp2 v2 split experts4: learned, packed, plain",
    "tp2 pp2 looped2 split: grouped, sliced, plain",
    "cp2 dp2 experts4 ep2: grouped, sliced, plain",
    "tp2 sp dp2 experts4 ep2: learned, recompute, distributed",
    "tp2 dp2: llama, sliced, plain",
    "tp2 sp cp2: grouped, packed, plain",
)
"""Rows of four processes in which every two kinds meet, with one of the two placements of several stages."""
_KINDS = tuple(row for row in all_rows() if str(row) in BY_DEFAULT)
ROWS: dict[str, tuple[Row, ...]] = {
    "kinds": _KINDS,
    "pairs": tuple(row for row in covering_rows() if row not in _KINDS),
    "full": full_rows(),
}
LIMITS_S = {"kinds": 900, "pairs": 900, "full": 9000}
MATRIX_ITERATIONS = {"kinds": 2, "pairs": 2, "full": 3}
ROUTER_ITERATIONS = 3
PLACEMENTS = {
    (1, 1, "looped"): (0,),
    (2, 1, "looped"): (0, 1),
    (4, 1, "looped"): (0, 1, 2, 3),
    (2, 2, "looped"): (0, 1, 0, 1),
    (2, 2, "v"): (0, 1, 1, 0),
}
"""The rank of every stage, by pipeline size, stages per rank and placement."""


CASES_OF: dict[int, Cases] = {ITERATIONS: CASES, MORE_ITERATIONS: MORE_CASES}
"""By number of iterations."""


@pytest.fixture(scope="module")
def cuts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Cell, str, str], Figures]:
    """The figures of a cut of a cell on a model, made for the cell's cuts together when first asked for."""

    @functools.cache
    def report(iterations: int, cell: Cell) -> dict[str, Figures]:
        cases = {
            f"{model}, {cut}": {"cell": {"pp": cell.pp}, "model": model, "plan": CUTS[cut].flags}
            for model, cuts in CASES_OF[iterations][cell].items()
            for cut in cuts
        }
        return parity_of(tmp_path_factory.mktemp("parity"), cases, iterations, 900)

    return lambda iterations, cell, model, cut: report(iterations, cell)[f"{model}, {cut}"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Figures]]:
    """The figures of all rows of a matrix, made when first asked for."""

    @functools.cache
    def figures(name: str) -> dict[str, Figures]:
        cases = {str(row): asdict(row.case) for row in ROWS[name]}
        return parity_of(tmp_path_factory.mktemp("matrix"), cases, MATRIX_ITERATIONS[name], LIMITS_S[name])

    return figures


@pytest.mark.parametrize(
    ("iterations", "cell", "model", "cut"),
    [
        pytest.param(iterations, cell, model, cut, id=f"{cell}: {model}, {cut}, {iterations}", marks=marks)
        for iterations, marks in ((ITERATIONS, ()), (MORE_ITERATIONS, pytest.mark.slow))
        for cell, models in CASES_OF[iterations].items()
        for model, cuts in models.items()
        for cut in cuts
    ],
)
def test_plans_train_as_the_stock_schedule_does(
    cuts_of: Callable[[int, Cell, str, str], Figures], iterations: int, cell: Cell, model: str, cut: str
) -> None:
    figures = cuts_of(iterations, cell, model, cut)
    check_closeness(figures)
    (plans,) = figures["plans"]
    wanted = CUTS[cut]
    assert figures["num_losses"] == [iterations, 1]
    assert figures["learned"] > LEARNED[iterations]
    assert len(plans) == iterations
    assert all(plan["slices"] == min(wanted.slices, plan["longest"]) for plan in plans)
    assert any(plan["slices"] == wanted.slices for plan in plans)
    assert any(wanted.has in plans[i]["kinds"] for i in (0, -1))
    assert sorted({share for plan in plans for share in plan["recompute"]}) == list(wanted.recompute)
    assert any(plan["weights"] > 0 for plan in plans) == wanted.splits
    assert not any(plan["padding"] for plan in plans)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{row}{' (full)' if name == 'full' else ''}", marks=marks)
        for name, marks in (("kinds", ()), ("pairs", pytest.mark.slow), ("full", pytest.mark.slow))
        for row in ROWS[name]
    ],
)
def test_every_group_of_processes_trains_as_the_stock_schedule_does(
    matrix: Callable[[str], dict[str, Figures]], name: str, row: Any
) -> None:
    figures, cell = matrix(name)[str(row)], row.cell
    check_closeness(figures)
    assert figures["num_losses"] == [MATRIX_ITERATIONS[name], 1]
    assert figures["num_processes"] == cell.num_processes
    assert len(figures["plans"]) == cell.dp
    plans = [plan for replica in figures["plans"] for plan in replica]
    assert len(plans) == cell.dp * MATRIX_ITERATIONS[name]
    counts = list(zip(*([plan["sequences"] for plan in replica] for replica in figures["plans"]), strict=True))
    assert {sum(of_replicas) for of_replicas in counts} == {BATCH}
    assert {plan["token_multiple"] for plan in plans} == {cell.cp * (cell.tp if cell.sp else 1)}
    assert {tuple(plan["placement"]) for plan in plans} == {PLACEMENTS[cell.pp, cell.virtual, cell.placement]}
    assert any(plan["padding"] for plan in plans) == (cell.sp or cell.cp > 1)
    kinds = {kind for plan in plans for kind in plan["kinds"]}
    assert ("packed" if row.plan == "packed" else "hybrid") in kinds
    recomputed = {share for plan in plans for share in plan["recompute"]}
    assert ("none" not in recomputed) == (row.plan == "recompute")
    assert any(plan["weights"] > 0 for plan in plans) == cell.split


def test_replicas_train_on_unequal_numbers_of_documents(matrix: Callable[[str], dict[str, Figures]]) -> None:
    """With and without experts to share: or the rows above prove nothing about them."""
    found = matrix("kinds")
    for shares_experts in (False, True):
        rows = [found[str(row)]["plans"] for row in ROWS["kinds"] if row.cell.dp > 1 and (row.cell.ep > 1) == shares_experts]
        assert any(len({plan["sequences"] for plan in plans}) > 1 for row in rows for plans in zip(*row, strict=True))


def test_the_rows_bring_every_two_choices_together() -> None:
    everything = set().union(*(row.pairs for row in all_rows()))
    assert set().union(*(row.pairs for row in covering_rows())) == everything
    assert [row.cell for row in full_rows()] == all_cells()
    assert len(_KINDS) == len(BY_DEFAULT)
    in_the_slow_set = {("cp", "looped"), ("cp", "tp"), ("dp", "v"), ("ep", "v"), ("looped", "sp"), ("tp", "v")}
    assert meetings(all_rows()) - meetings(_KINDS) == in_the_slow_set
    assert meetings(all_rows()) == meetings([*_KINDS, *ROWS["pairs"]])
    assert {*_KINDS, *ROWS["pairs"]} >= {*covering_rows()}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--experts", 4, "--ep", 2], "--ep 2 on --dp 1"),
        (["--experts", 4, "--tp", 2], "--experts 4 with --tp 2 and without --sp"),
        (["--lengths", "12,x"], "'x'"),
    ],
)
def test_the_script_says_in_a_line_what_it_cannot_run(flags: list[object], says: str) -> None:
    finished = run([sys.executable, "-m", "scripts.parity", *flags], {}, 60)
    assert finished.returncode in (1, 2)
    assert says in finished.output.splitlines()[-1]


def test_a_run_that_fails_is_a_row_that_failed_and_others_go_on(tmp_path: Path) -> None:
    cases = {
        "too many slices": {"cell": {}, "model": "llama", "plan": "--epp-slices 1000"},
        "fine": {"cell": {}, "model": "llama", "plan": "--epp-slices 2"},
    }
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    finished = launch(1, "-m", "scripts.parity", "--cases", path, "--iterations", 1, timeout_s=180)
    assert finished.returncode == 1
    rows = [line for line in finished.output.splitlines() if line.startswith(tuple(cases))]
    assert "failed" in rows[0]
    assert "failed" not in rows[1]
    assert "--epp-slices" in finished.output


ROUTERS = {
    "losses": ("--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001", "--epp-planner 1f1b"),
    "losses by sequence, capacity": (
        "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss --moe-expert-capacity-factor 1.0",
        "--epp-planner 1f1b",
    ),
    "bias, shared experts, dense layers": (
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1 "
        "--moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1,1,0]",
        "--epp-slices 3 --epp-recompute 1",
    ),
}


PADDED = {"context": {"cp": 2}, "tensor and sequence": {"tp": 2, "sp": True}}


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    """Figures of routers that count and add up by chunk, in chunks of one whole document; and of others, in slices; and of
    padded chunks on ranks that share them, beside one process.
    """
    experts = {"experts": 4}
    cases = {name: {"cell": experts, "model": "llama", "plan": plan, "both": both} for name, (both, plan) in ROUTERS.items()}
    shared = {
        "model": "learned",
        "plan": "--epp-planner 1f1b --epp-recompute 4",
        "both": f"{ALL_STATISTICS} --global-batch-size 8",
        "alone": True,
    }
    cases |= {name: shared | {"cell": experts | cell} for name, cell in PADDED.items()}
    return parity_of(tmp_path_factory.mktemp("routers"), cases, ROUTER_ITERATIONS, batch=SMALL_BATCH)


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_invisible_to_routers(routers: dict[str, Figures], name: str) -> None:
    """Documents of odd lengths train experts as on one process, whose chunks have no padding."""
    check_closeness(routers[name])
    (plans,) = routers[name]["plans"]
    assert all(plan["padding"] for plan in plans)
    assert all(plan["recompute"] == ["all"] for plan in plans)


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_train_as_the_stock_schedule_does(routers: dict[str, Figures], name: str) -> None:
    check_closeness(routers[name])
