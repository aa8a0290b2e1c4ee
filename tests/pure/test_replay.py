"""`scripts/replay.py` plans the same cases twice alike, and names the case whose plan is another one."""

import json
from pathlib import Path

import pytest

from scripts import replay

FIRST = ["--start", "1", "--first", "3", "--jobs", "1"]


def test_equal_plans_are_told_and_a_different_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "before.json"
    assert replay.main([str(file), *FIRST]) == 0
    assert replay.main([str(file), "--compare", *FIRST]) == 0
    assert capsys.readouterr().out.endswith("0 differ\n")
    before = json.loads(file.read_text())
    assert any(len(digest) == 64 for digest in before.values())  # plans, not refusals alone
    file.write_text(json.dumps(before | {"3": "another"}))
    assert replay.main([str(file), "--compare", *FIRST]) == 1
    assert f"seed 3: another  ->  {before['3']}\n1 differ\n" in capsys.readouterr().out
