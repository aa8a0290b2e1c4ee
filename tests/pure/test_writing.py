"""Files are written whole or not at all, whichever step of the operating system fails."""

import errno
import os
import stat
from pathlib import Path

import pytest

from megatron_epp.plan.writing import append_line, replacing, write_text
from tests.support.failing_disk import swept


def test_whatever_fails_a_new_file_is_whole_or_not_there(tmp_path: Path):
    """That an old one is whole is seen at commands: `test_bad_mutants.py`."""
    path, failures = tmp_path / "plan.json", 0
    for error in swept(lambda: write_text(path, "new content")):
        if error is not None:
            failures += 1
            assert error.filename == str(path)
        assert error is not None or path.exists()
        assert [one.read_text() for one in tmp_path.iterdir()] in ([], ["new content"])
        path.unlink(missing_ok=True)
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
