"""A launcher's folder for temporary files of its processes, removed at its end, or by the next launcher if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import current_process
from pathlib import Path

FOLDER_VARIABLE = "EPP_LAUNCHER_FOLDER"
"""Environment variable that names the folder to the launcher's processes."""
_LOCK = "lock"
_MOST_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Longest path of a folder in which the paths of sockets are short enough for the system."""


@contextlib.contextmanager
def launcher_folder() -> Iterator[Path]:
    """Make a new temporary folder, named in the environment and locked as long as this process lives.

    Abandoned folders of launchers of the same user are removed.

    Raises:
        OSError: it cannot be made.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder, handle = _locked()
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def is_abandoned(folder: Path) -> bool:
    """True if a launcher's folder exists and its launcher has ended."""
    with _if_abandoned(folder) as abandoned:
        return abandoned


def keep_sockets_in_folder() -> None:
    """Make this process and its children create `multiprocessing` sockets in the launcher's folder, if there is one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    if not os.path.isdir(folder) or len(os.fsencode(folder)) > _MOST_BYTES:
        del os.environ[FOLDER_VARIABLE]
        return
    # As `multiprocessing.util.get_temp_dir` keeps it, without its removal at exit: the launcher removes all, perhaps before.
    config = current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)


def _prefix() -> str:
    """Prefix of this machine's folders: other machines may share the file system but not its locks."""
    return f"epp-{hashlib.sha256(platform.node().encode()).hexdigest()[:4]}-"


def _locked() -> tuple[Path, int]:
    """Make a new folder; return it and the open file that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix()))
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: without the file, the folder is not taken for abandoned
            (folder / _LOCK).unlink(missing_ok=True)
        if folder.is_dir():  # else another launcher has taken it for abandoned before it was locked
            return folder, handle
        os.close(handle)


@contextlib.contextmanager
def _if_abandoned(folder: Path) -> Iterator[bool]:
    """Yield True if a folder is abandoned; no launcher can lock it within the context."""
    handle = _shared_lock(folder)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _shared_lock(folder: Path) -> int | None:
    """Open the lock file of a folder of this user with a shared lock; None if its launcher locks it or it has no such file."""
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_prefix()}*"):
        with _if_abandoned(folder) as abandoned:
            if abandoned:
                shutil.rmtree(folder, ignore_errors=True)
