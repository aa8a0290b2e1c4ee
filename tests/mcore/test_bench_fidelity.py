"""The comparison of plans with runs, on few documents: its figures are there and fit together. None of them is judged."""

import json
import subprocess
import sys

import pytest

from tests.support.mcore.synthetic_documents import documents_of, write_pair

pytestmark = pytest.mark.slow  # `test_report_fidelity.py` has how a run is compared with its plan
ITERATIONS = 2


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    data = write_pair(folder / "documents", documents_of([n + 1 for n in (900, 40, 300, 1500, 700, 20, 650, 1200) * 4]))
    command = [sys.executable, "-m", "scripts.bench.fidelity", "--iterations", str(ITERATIONS)]
    command += ["--data-path", data]
    done = subprocess.run([*command, "-o", str(folder / "runs")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "runs" / "report.json").read_text())
    assert done.stdout.rstrip().endswith((folder / "runs" / "report.md").read_text().rstrip())
    return found


@pytest.mark.parametrize("part", ["free", "capped"])
def test_every_iteration_but_the_first_is_compared(report, part):
    rows = report[part]["iterations"]
    assert len(rows) == ITERATIONS
    for row in rows:
        assert row["error"] == pytest.approx(row["planned_us"] / row["measured_us"] - 1)
        assert 0 < row["undisturbed_us"] <= row["replayed_us"] * 1.001
        assert row["planned_with_costs_after_us"] > 0


@pytest.mark.parametrize("part", ["free", "capped"])
def test_every_rank_has_its_peak_compared_in_every_iteration(report, part):
    peaks = report[part]["peaks"]
    assert len(peaks["pairs"]) == ITERATIONS * report["pipeline"]
    errors = [planned / measured - 1 for planned, measured in peaks["pairs"]]
    assert peaks["worst_error"] == pytest.approx(max(errors, key=abs))


def test_the_cap_asks_for_recompute_and_the_free_run_does_not(report):
    recomputed = {part: sum(row["recomputed_layers"] for row in report[part]["iterations"]) for part in ("free", "capped")}
    assert recomputed["free"] == 0 < recomputed["capped"]
    assert "B with recompute" in report["capped"]["kinds"]
