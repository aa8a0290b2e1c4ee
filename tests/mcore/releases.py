"""Releases of megatron-core beside the one the tests run with, each in a folder of its own that stays for the next run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OTHER_RELEASES = ("0.17.1", "0.18.2")
FOLDER = Path(sys.prefix) / "megatron-releases"


def release(wanted: str) -> Path:
    """The folder that holds a release's `megatron/`; from the package index the first time. Skips the test without one."""
    folder = FOLDER / wanted
    if not folder.exists():
        partial = FOLDER / f"{wanted}.partial-{os.getpid()}"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*install, "--target", partial, f"megatron-core=={wanted}"], capture_output=True, text=True)
        if done.returncode != 0:
            shutil.rmtree(partial, ignore_errors=True)
            pytest.skip(f"needs megatron-core=={wanted} in {folder}, or a package index that pip reaches: {done.stderr[-200:]}")
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder
