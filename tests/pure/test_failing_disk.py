"""Whichever step of a disk fails, a command ends in one line that names the file, and the old file is whole."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from megatron_epp.cli.main import main
from megatron_epp.launch.command import save_run
from megatron_epp.launch.yaml_settings import SettingsError
from megatron_epp.plan.writing import append_line, replacing, write_text
from tests.support import ROOT
from tests.support.failing_disk import swept

PLAN = str(ROOT / "docs" / "examples" / "plan.json")
BATCH = ["--lengths", "900,300,50", "--stages", "2", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "4"]
COMMANDS = {
    "plan": ["plan", *BATCH, "-o"],
    "page": ["show", PLAN, "-o"],
    "trace": ["show", PLAN, "--trace"],
    "picture": ["show", PLAN, "--png"],
    "profile": ["profile", "--by-formula", "h100x8", "--model", "tiny-gpt", "-o"],
}
SUFFIXES = {"page": ".html", "picture": ".png"}
OLD = "what was there before"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_in_one_line_and_the_old_file_is_whole(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"out{SUFFIXES.get(name, '.json')}"
    path.write_text(OLD)
    refused = 0
    for code in swept(lambda: main([*COMMANDS[name], str(path)])):
        said = capsys.readouterr().err
        if code != 0:
            refused += 1
            assert code == 2
            errors = [line for line in said.splitlines() if not re.fullmatch(r".+, \d+ s", line)]  # progress of a slow machine
            assert len(errors) == 1, said
            assert f"{path}: No space left on device" in said
            assert path.read_text() == OLD
        else:
            assert path.read_bytes() != OLD.encode()
        assert [one.name for one in tmp_path.iterdir()] == [path.name]
        path.write_text(OLD)
    assert refused >= 3


@pytest.mark.parametrize("name", ["plan", "page", "trace", "profile"])
def test_a_command_without_memory_ends_in_one_line_and_the_old_file_is_whole(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"out{SUFFIXES.get(name, '.json')}"
    path.write_text(OLD)
    for code in swept(lambda: main([*COMMANDS[name], str(path)]), MemoryError):
        said = capsys.readouterr().err
        if code != 0:
            assert (code, said) == (2, "megatron-epp: error: no memory left\n")
            assert path.read_text() == OLD
        assert [one.name for one in tmp_path.iterdir()] == [path.name]
        path.write_text(OLD)


def test_settings_of_a_run_end_in_one_line_and_old_ones_are_whole(tmp_path: Path) -> None:
    names, refused = ("command.sh", "settings.yaml", "versions.json"), 0

    def saved() -> str:
        try:
            save_run(tmp_path, {"epp": {"slices": 2}}, ["true"], {"HF_TOKEN": "abc"})
        except SettingsError as error:
            return str(error)
        return ""

    def write_old() -> None:
        for name in names:
            (tmp_path / name).write_text(OLD)

    write_old()
    for said in swept(saved):
        assert isinstance(said, str)
        if said:
            refused += 1
            (named,) = [name for name in names if name in said]
            assert (tmp_path / named).read_text() == OLD
            assert "No space left on device" in said
        assert sorted(one.name for one in tmp_path.iterdir()) == sorted(names)
        write_old()
    assert refused >= 9


# ---- files are written whole or not at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["old content", None])
def test_whatever_fails_the_old_file_is_whole_or_the_new_one_is(tmp_path: Path, old: str | None):
    path, failures = tmp_path / "plan.json", 0
    if old is not None:
        path.write_text(old)
    for error in swept(lambda: write_text(path, "new content")):
        if error is not None:
            failures += 1
            assert error.filename == str(path)
            assert (path.read_text() if path.exists() else None) in (old, "new content")
        else:
            assert path.read_text() == "new content"
        assert [one.name for one in tmp_path.iterdir()] in ([path.name], [])
        path.unlink(missing_ok=True)
        if old is not None:
            path.write_text(old)
    assert failures >= 4


def test_whatever_fails_a_log_keeps_whole_lines(tmp_path: Path):
    path, failures = tmp_path / "lines.jsonl", 0
    path.write_text("first\n")
    for error in swept(lambda: append_line(path, "second")):
        failures += error is not None
        assert path.read_text() in ("first\n", "first\nsecond\n")
        assert (path.read_text() == "first\n") == (error is not None)
        path.write_text("first\n")
    assert failures >= 3


def test_a_disk_that_is_full_half_way_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, write, calls = tmp_path / "lines.jsonl", os.write, []

    def half(handle: int, content: memoryview) -> int:
        calls.append(len(content))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, content[: len(content) // 2])

    path.write_text("first\n")
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, "second")
    assert path.read_text() == "first\n"


def test_a_line_after_a_half_written_one_is_a_line_of_its_own(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"iteration": 1}\n{"itera')
    append_line(path, '{"iteration": 2}')
    assert path.read_text().splitlines() == ['{"iteration": 1}', '{"itera', '{"iteration": 2}']


def test_links_are_followed_and_devices_written_to(tmp_path: Path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    write_text("/dev/null", "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_private_file_is_never_readable_by_others_and_others_keep_their_mode(tmp_path: Path):
    path = tmp_path / "settings.yaml"
    path.write_text("public")
    path.chmod(0o640)
    write_text(path, "still")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with replacing(path, private=True) as scratch:
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o600
        scratch.write_text("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_block_leaves_when_it_fails_is_removed(tmp_path: Path):
    path = tmp_path / "picture.png"
    path.write_text("old")

    def draw() -> None:
        with replacing(path) as scratch:
            assert scratch.suffix == ".png"
            scratch.write_text("half")
            raise RuntimeError("drawing")

    with pytest.raises(RuntimeError, match="drawing"):
        draw()
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]
