"""One training per folder: a lock that names the run that holds it, released when the process that took it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import parse_json, printable

logger = logging.getLogger(__name__)

LOCK = "epp-run.lock"
_MOST_BYTES = 4096
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[Path, int] = {}  # open handles of the folders that this process holds, which the system closes when it ends


def hold(folder: str | os.PathLike[str], run: str) -> None:
    """Make a folder and hold it by a lock of POSIX until this process ends; without locks, a warning says so.

    Raises `EppError` if another run holds it, or it cannot be written.
    """
    path = Path(folder).resolve() / LOCK
    if path in _held:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EppError(f"{folder} cannot be written ({error.strerror})") from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{json.dumps(about)}\n".encode(), 0)
    except OSError as error:
        holder = _holder(handle)
        os.close(handle)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise EppError(f"another run writes into {folder}: {holder}; end it, or choose another folder") from error
        if error.errno not in _UNSUPPORTED:
            raise EppError(f"{path} cannot be written ({error.strerror})") from error
        logger.warning("%s cannot be locked (%s): nothing keeps a second run out of it", folder, error.strerror)
        return
    _held[path] = handle


def _holder(handle: int) -> str:
    try:
        about: Any = parse_json(os.pread(handle, _MOST_BYTES, 0), "the lock")
    except (OSError, EppError):
        about = None
    if not isinstance(about, Mapping):
        return "it has not said which"
    words = {name: printable(str(about.get(name, "?"))[:64]) for name in ("run", "host", "pid", "since")}
    return "run {run} on {host}, process {pid}, since {since}".format(**words)
