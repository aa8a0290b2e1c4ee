"""`python -m scripts.parity`: what it refuses, and a run that fails among others. `test_matrix.py` has the trainings."""

import json
from pathlib import Path

from tests.support.mcore.forked import launch


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
