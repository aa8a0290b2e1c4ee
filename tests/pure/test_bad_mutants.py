"""Files with random damage, and disks at any failing step, end in a line that names the file, never in a traceback."""

import re
from pathlib import Path

import pytest

from megatron_epp.tools.cli.main import main
from tests.support import ROOT
from tests.support.failing_disk import swept
from tests.support.fuzz.formats import FORMATS
from tests.support.fuzz.judge import refused_though_sound, run
from tests.support.seeds import some_by_default

MUTANTS = 8
"""Number of damaged files of every kind; with ``-m slow`` there are 10,000, which take minutes for each."""


@some_by_default(("name", "number"), [(name, count) for count in (MUTANTS, 10_000) for name in FORMATS], len(FORMATS))
def test_a_damaged_file_is_taken_or_refused_by_name_in_one_line_within_limits(name: str, number: int, tmp_path: Path):
    tally = run(name, FORMATS[name], range(number), tmp_path)
    assert tally.faults == []
    assert tally.tried == number * len(FORMATS[name].readers)
    if name != "lock":  # whatever the file says of its holder, the lock counts
        assert tally.refused > tally.tried // 10


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_sound_before_they_are_damaged(name: str, tmp_path: Path):
    assert refused_though_sound(FORMATS[name], tmp_path) == {}


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
