"""Short trainings against Megatron's own schedule, for the fast set, and what a comparison reports: see `test_matrix.py`."""

import json
from pathlib import Path

import pytest

from megatron_epp.plan.document import digest
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.serialize import load
from tests.support.mcore.forked import launch
from tests.support.mcore.parity_figures import Figures, check_closeness, parity_of

ITERATIONS = 2
REPORTED = "two stages"
MEASURED = "--epp-measure-memory --epp-trace 2 --log-interval 1"
CASES = {
    "one stage": {
        "cell": {},
        "model": "llama",
        "plan": "--epp-slices 3 --epp-recompute 1 --epp-loss-block-tokens 5",
        "optimizer": "--use-distributed-optimizer",
    },
    "two stages": {"cell": {"pp": 2, "split": True}, "model": "gpt2", "plan": f"--epp-slices 3 {MEASURED}"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Figures]:
    cases = {name: dict(case) for name, case in CASES.items()}
    cases[REPORTED]["plan"] += f" --epp-report-dir {folder / 'report'}"
    return parity_of(folder, cases, ITERATIONS)


@pytest.mark.parametrize("name", CASES)
def test_plans_train_as_the_stock_schedule_does(figures: dict[str, Figures], name: str) -> None:
    check_closeness(figures[name])
    (plans,) = figures[name]["plans"]
    assert figures[name]["num_losses"] == [ITERATIONS, 1]
    assert any("hybrid" in plan["kinds"] for plan in plans)
    assert any("none" not in plan["recompute"] for plan in plans) == ("recompute" in CASES[name]["plan"])
    assert any(plan["weights"] > 0 for plan in plans) == (name == "two stages")


def test_an_iteration_is_reported_as_planned_and_as_measured(figures: dict[str, Figures], folder: Path) -> None:
    assert "error" not in figures[REPORTED]
    lines = [json.loads(line) for line in (folder / "report" / "iterations.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    for line in lines:
        assert line["schedule"] == "elastic"
        assert 0 < line["makespan_us"]["measured"] <= line["elapsed_us"]
        assert line["makespan_us"]["planned"] > 0
        assert 0 < line["loss"] < 20
        assert line["tokens"] > line["sequences"] > 0
        assert line["replicas"] == 1
        assert line["imbalance"] == 0.0
        for measured, planned in zip(line["peak_activation_bytes"], line["planned_peak_activation_bytes"], strict=True):
            assert 0 < measured <= planned
    plan, measured = load(folder / "report" / "plan.json"), Measured.load(folder / "report" / "measured.json")
    assert measured.plan_digest == digest(plan)
    assert plan.predicted.makespan_us == lines[1]["makespan_us"]["planned"]
    assert measured.makespan_us == lines[1]["makespan_us"]["measured"]


def test_a_run_that_fails_is_a_row_that_failed_and_others_go_on(tmp_path: Path) -> None:
    slices = {"too many slices": 1000, "fine": 2}
    cases = {name: {"cell": {}, "model": "llama", "plan": f"--epp-slices {count}"} for name, count in slices.items()}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    finished = launch(1, "-m", "scripts.parity", "--cases", path, "--iterations", 1, timeout_s=180)
    assert finished.returncode == 1
    rows = [line for line in finished.output.splitlines() if line.startswith(tuple(cases))]
    assert "failed" in rows[0]
    assert "failed" not in rows[1]
    assert "--epp-slices" in finished.output
