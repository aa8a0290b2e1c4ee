"""Writing of files: whole and on disk, or not at all. Every file of this package goes through these functions.

A file is written next to its place, synced, and renamed, so that readers find the old or the new content, also after a crash.
Links are followed, except by files for their owner alone; devices and pipes are written to. A log grows by whole lines.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_PRIVATE, _USUAL = 0o600, 0o666
"""Modes of files that only their owner may read, and of other new files, before the umask."""

Name = str | os.PathLike[str]


def write_text(path: Name, text: str, *, private: bool = False) -> None:
    """Write a text in UTF-8, or leave the file that was there as it was. Lone surrogates become what they were read from.

    The folder must exist. With `private`, only the owner may read it, whatever the mode of the file before. Raises OSError,
    whose `filename` is the path as given.
    """
    with replacing(path, private=private) as scratch, _named(path), _opened(scratch, os.O_WRONLY) as handle:
        _write(handle, text)


@contextlib.contextmanager
def replacing(path: Name, *, private: bool = False) -> Iterator[Path]:
    """Give a path to write a file's content to, by whatever writes files; it takes the file's place when the block ends.

    Where the block raises, the file stays as it was. The path has the file's suffix. For a device or a pipe it is the path of
    that. The folder must exist; with `private`, only the owner may read the file, and a link in its place is replaced. Raises
    OSError, whose `filename` is the path as given.
    """
    target = Path(path if private else os.path.realpath(path))
    with _named(path):
        mode = None if target.is_symlink() else _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        yield target
        return
    scratch = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        with _named(path):
            scratch.unlink(missing_ok=True)
            with _opened(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE if private else _USUAL) as handle:
                if mode is not None and not private:
                    with contextlib.suppress(PermissionError):
                        os.fchmod(handle, stat.S_IMODE(mode))
        with _named(path, scratch):
            yield scratch
        with _named(path):
            sync(scratch)
            os.replace(scratch, target)
            with contextlib.suppress(OSError, MemoryError):
                sync(target.parent)  # the rename, where the file system can; the file itself is there already
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def append_line(path: Name, line: str) -> None:
    """Append a line, without its end, to a log in one write, or leave it as before. Raises OSError with the path as given."""
    content = f"{line}\n"
    with _named(path), _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _USUAL) as handle:
        before = os.fstat(handle)
        if stat.S_ISREG(before.st_mode) and before.st_size and os.pread(handle, 1, before.st_size - 1) != b"\n":
            content = f"\n{content}"  # a process was killed within its last line
        try:
            _write(handle, content)
        except OSError:
            if stat.S_ISREG(before.st_mode):
                os.ftruncate(handle, before.st_size)
            raise


def sync(path: Name) -> None:
    """Wait until a file is on disk. Raises OSError."""
    with _opened(path, os.O_RDONLY) as handle:
        os.fsync(handle)


def _write(handle: int, text: str) -> None:
    left = memoryview(text.encode("utf-8", "surrogateescape"))
    while left:
        left = left[os.write(handle, left) :]


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(path: Name, flags: int, mode: int = _USUAL) -> Iterator[int]:
    handle = os.open(path, flags, mode)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(path: Name, scratch: Name | None = None) -> Iterator[None]:
    """Name the file in errors, not what is written in its place; with `scratch` only in errors of that file, or of none."""
    try:
        yield
    except OSError as error:
        if scratch is not None and error.filename not in (None, os.fspath(scratch)):
            raise
        error.filename, error.filename2 = os.fspath(path), None
        raise
