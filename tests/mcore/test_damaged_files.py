"""Files that training and `prepare` read, with random damage: each is taken, or refused in one line that names it and where."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.fuzz.judge import refused_though_sound, run
from tests.support.fuzz.mcore_formats import FORMATS
from tests.support.seeds import some_by_default

MUTANTS = 60
"""Number of damaged files of every kind; with ``-m slow`` there are 10,000, which take minutes for each."""


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """End the job of one rank that reading has made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@some_by_default(("name", "number"), [(name, count) for count in (MUTANTS, 10_000) for name in FORMATS], len(FORMATS))
def test_a_damaged_file_is_taken_or_refused_by_name_in_one_line_within_limits(name: str, number: int, tmp_path: Path):
    tally = run(name, FORMATS[name], range(number), tmp_path)
    assert tally.faults == []
    assert tally.refused > tally.tried // 10


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_sound_before_they_are_damaged(name: str, tmp_path: Path):
    assert refused_though_sound(FORMATS[name], tmp_path) == {}
