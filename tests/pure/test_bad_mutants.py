"""Files with random damage are taken, or refused in one line that names them and where; never a traceback or a long wait."""

from pathlib import Path

import pytest

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
