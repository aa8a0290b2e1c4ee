"""Lifetime of a run's processes and of their temporary files: both end with the process that started them, however it ends.

Temporary files are in a folder that the launcher removes at its end, or the next launcher if this one was killed. A rank hands
the text of a refusal to its launcher in the error file that torchrun gives each process; torchrun itself prints that text as
the traceback of the rank, in the table at the end of its output.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1
FOLDER_VARIABLE = "EPP_LAUNCHER_FOLDER"  # environment variable that names the folder to the launcher's processes
_LOCK = "lock"
_MOST_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Longest path of a folder in which the paths of sockets are short enough for the system."""
FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # environment variable with the path of the error file that torchrun gives a process
_REFUSAL_KEY, _EXIT_CODE_KEY = "megatron_epp", "exit_code"


def end_with_launcher() -> None:
    """Make this process end with the torchrun that started it, if any, which by itself leaves ranks running when killed."""
    if _UNDER_TORCHRUN not in os.environ or multiprocessing.parent_process() is not None:
        return
    end_with_parent()
    if (folder := os.environ.get(FOLDER_VARIABLE)) and is_abandoned(Path(folder)):  # it ended before this
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends, for those whose parent's main thread starts them."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        logger.warning("this process may outlive what started it: %s", os.strerror(ctypes.get_errno()))
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it ended before this
        os.kill(os.getpid(), signal.SIGKILL)


def run_until_parent_ends(target: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    threading.Thread(target=_end_after_parent, name="end with parent", daemon=True).start()
    return target(*args, **named)


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if FOLDER_VARIABLE not in os.environ:  # else the launcher removes it, and others may use it
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(1)


@contextlib.contextmanager
def launcher_folder() -> Iterator[Path]:
    """Make a folder, named in the environment and locked while this process lives; remove abandoned ones. Raises OSError."""
    for other in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with _if_abandoned(other) as abandoned:
            if abandoned:
                shutil.rmtree(other, ignore_errors=True)
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
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return
    if not os.path.isdir(folder) or len(os.fsencode(folder)) > _MOST_BYTES:
        del os.environ[FOLDER_VARIABLE]
        return
    # As `multiprocessing.util.get_temp_dir` keeps it, without its removal at exit: the launcher removes all, perhaps before.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)


def _prefix() -> str:
    """Prefix of this machine's folders: other machines may share the file system but not its locks."""
    return f"epp-{hashlib.sha256(platform.node().encode()).hexdigest()[:4]}-"


def _locked() -> tuple[Path, int]:
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
    """Yield True if a folder of this user has a lock file that no launcher locks; none can lock it within the context."""
    is_abandoned = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
            if os.fstat(handle).st_uid == os.geteuid():
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_abandoned = True
        yield is_abandoned


def hand_over(text: str, exit_code: int) -> bool:
    """Write a refusal for the launcher to end with; return True if that is this package's own, which repeats it at the end."""
    if not (path := os.environ.get(FILE_VARIABLE)):
        return False
    about = {"py_callstack": text, "timestamp": str(int(time.time())), _REFUSAL_KEY: True, _EXIT_CODE_KEY: exit_code}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": about}}, file)
    except OSError:
        return False
    return FOLDER_VARIABLE in os.environ


def handed_over(message: str | Mapping[str, Any]) -> tuple[str, int] | None:
    """Return a refusal's text and exit code from the message of torchrun's `ProcessFailure`; None for another failure."""
    if isinstance(message, str) or not (about := message.get("extraInfo", {})).get(_REFUSAL_KEY):
        return None
    return str(message["message"]), int(about.get(_EXIT_CODE_KEY, 1))
