"""Files with random damage are taken, or refused in one line that names them and where; never a traceback or a long wait."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.plan import EppError
from tests.support.fuzz import judge
from tests.support.fuzz.damage import text_damage
from tests.support.fuzz.formats import FORMATS
from tests.support.fuzz.judge import Format, faults_of_campaign, mutant, refused_though_sound, run

MUTANTS = 8
"""Number of damaged files of every kind; with ``-m slow`` there are 10,000."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_taken_or_refused_by_name_in_one_line(name: str, tmp_path: Path):
    tally = run(name, FORMATS[name], range(MUTANTS), 0, tmp_path)
    assert tally.faults == []
    assert tally.tried == MUTANTS * len(FORMATS[name].readers)
    if name != "lock":  # whatever the file says of its holder, the lock counts
        assert tally.refused > tally.tried // 10


@pytest.mark.slow  # minutes of a processor for each format
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_damaged_files_are_taken_or_refused_within_limits(name: str):
    assert faults_of_campaign(name, 10_000) == ""


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_sound_before_they_are_damaged(name: str, tmp_path: Path):
    assert refused_though_sound(FORMATS[name], tmp_path) == {}


def form_with(read: judge.Reader) -> Format:
    return Format("given.txt", lambda: (b"some text",), text_damage, {"read": read}, r"line \d")


def refused(message: str) -> judge.Reader:
    def read(path: Path) -> str:
        raise EppError(message.replace("FILE", str(path)))

    return read


def endless(path: Path) -> str:
    while True:
        try:
            sum(range(1000))
        except Exception:
            return ""


def broken(path: Path) -> str:
    raise KeyError(path.name)


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (broken, "KeyError"),
        (endless, "reading takes more than"),
        (refused("FILE: line 1 is wrong\nand more"), "it is more than a line"),
        (refused("the file is wrong in line 1"), "it does not name the file"),
        (refused("FILE is wrong"), "it does not say where"),
        (refused("FILE: line 1 has \x1b[2J"), "it has control characters"),
        (judge.command("check", "FOLDER/missing.json"), "it does not name the file"),
        (judge.command("show", "--help", accepted=()), "exit code 0"),
    ],
)
def test_what_goes_wrong_is_found(read: judge.Reader, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge, "MOST_CPU_S", 0.05)
    tally = run("x", form_with(read), range(1), 0, tmp_path)
    assert len(tally.faults) == 1
    assert fault in tally.faults[0]


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutant_depends_on_its_number_and_the_seed_only(name: str):
    form = FORMATS[name]
    made = [mutant(name, form, seed, number) for seed, number in ((0, 5), (0, 5), (0, 6), (1, 5))]
    assert made[0] == made[1]
    assert len(set(made)) > 1


def test_the_command_prints_what_became_of_the_files(tmp_path: Path):
    command = [sys.executable, "-m", "tests.support.fuzz", "mask", "20", "--messages"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mask: 20 files, 20 readings: ")
    assert " 0 faults\n" in done.stdout
