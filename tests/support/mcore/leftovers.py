"""Processes and temporary files of runs, by the folder for temporary files that their environment names."""

from pathlib import Path

import psutil


def alive(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or is of another user
            pass
    return found


def files(folder: Path) -> list[Path]:
    return [path for pattern in ("pymp-*", "epp-*") for path in folder.glob(pattern)]
