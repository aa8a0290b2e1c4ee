"""Whichever step of a disk fails, a command ends in one line that names the file, and the old file is whole."""

import re
from pathlib import Path

import pytest

from megatron_epp.tools.cli.main import main
from tests.support import ROOT
from tests.support.failing_disk import swept

PLAN = str(ROOT / "docs" / "examples" / "plan.json")
BATCH = ["--lengths", "900,300,50", "--stages", "2", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "4"]
COMMANDS = {
    "plan": ["plan", *BATCH, "--layout", "even", "--planner", "1f1b", "-o"],
    "page": ["show", PLAN, "-o"],
    "trace": ["show", PLAN, "-o"],
    "picture": ["show", PLAN, "-o"],
    "profile": ["profile", "--by-formula", "h100x8", "--model", "tiny-gpt", "-o"],
}
SUFFIXES = {"page": ".html", "picture": ".png"}
OLD = "what was there before"


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        *((name, OSError, "No space left on device") for name in COMMANDS),
        *((name, MemoryError, "no memory left") for name in COMMANDS if name != "picture"),
    ],
)
def test_a_command_ends_in_one_line_and_the_old_file_is_whole(
    name: str, error: type[Exception], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"out{SUFFIXES.get(name, '.json')}"
    path.write_text(OLD)
    refused = 0
    for code in swept(lambda: main([*COMMANDS[name], str(path)]), error):
        said = capsys.readouterr().err
        if code != 0:
            refused += 1
            assert code == 2
            (line,) = [line for line in said.splitlines() if not re.fullmatch(r".+, \d+ s", line)]  # progress of a slow machine
            assert says in line
            assert (str(path) in line) == (error is OSError)
            assert path.read_text() == OLD
        else:
            assert path.read_bytes() != OLD.encode()
        assert [one.name for one in tmp_path.iterdir()] == [path.name]
        path.write_text(OLD)
    assert refused >= 3
