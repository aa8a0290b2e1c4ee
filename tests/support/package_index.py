"""Releases of packages next to what is installed, each in a folder of its own that stays for the next run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def release(package: str, version: str, folder: Path) -> Path:
    """The folder, in this one, that holds a release without what it needs; from the package index the first time. Skips the
    test without one.
    """
    found = folder / version
    if not found.exists():
        partial = folder / f"{version}.partial-{os.getpid()}"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*install, "--target", partial, f"{package}=={version}"], capture_output=True, text=True)
        if done.returncode != 0:
            shutil.rmtree(partial, ignore_errors=True)
            pytest.skip(f"needs {package}=={version} in {found}, or a package index that pip reaches: {done.stderr[-200:]}")
        try:
            partial.rename(found)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return found
