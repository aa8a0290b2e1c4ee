"""Files that training and `prepare` read, with random damage: each is taken, or refused in one line that names it and where."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.fuzz.judge import faults_of_campaign, refused_though_sound, run
from tests.support.fuzz.mcore_formats import FORMATS

MUTANTS = 60
"""Number of damaged files of every kind; with ``-m slow`` there are 10,000."""


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """End the job of one rank that reading has made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_taken_or_refused_by_name_in_one_line(name: str, tmp_path: Path):
    tally = run(name, FORMATS[name], range(MUTANTS), 0, tmp_path)
    assert tally.faults == []
    assert tally.refused > tally.tried // 10


@pytest.mark.slow  # minutes of a processor for each format
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_damaged_files_are_taken_or_refused_within_limits(name: str):
    assert faults_of_campaign(name, 10_000) == ""


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_sound_before_they_are_damaged(name: str, tmp_path: Path):
    assert refused_though_sound(FORMATS[name], tmp_path) == {}
