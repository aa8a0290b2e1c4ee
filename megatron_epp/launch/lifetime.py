"""Processes that end with the process that started them, however that ends, so that a killed run leaves none behind."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from megatron_epp.launch.scratch import FOLDER_VARIABLE, is_abandoned

logger = logging.getLogger(__name__)
_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Make this process end with the torchrun that started it; do nothing if none did.

    torchrun by itself leaves ranks running when it is killed.
    """
    if _UNDER_TORCHRUN not in os.environ or multiprocessing.parent_process() is not None:
        return
    end_with_parent()
    if (folder := os.environ.get(FOLDER_VARIABLE)) and is_abandoned(Path(folder)):  # it ended before this
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends, even if this process is stopped or hangs.

    Only on Linux, and only for processes whose parent's main thread starts them.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        logger.warning("this process may outlive what started it: %s", os.strerror(ctypes.get_errno()))
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it ended before this
        os.kill(os.getpid(), signal.SIGKILL)


class EndingWithParent:
    """Target of a `multiprocessing` process that makes the process end when its parent does.

    Args:
        target: function to run.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the function."""
        threading.Thread(target=_end_after_parent, name="end with parent", daemon=True).start()
        return self._target(*args, **named)


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if FOLDER_VARIABLE not in os.environ:  # else the launcher removes it, and others may use it
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(1)
