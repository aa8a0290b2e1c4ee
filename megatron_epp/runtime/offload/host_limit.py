"""Limit of host memory: that of the machine, or of the control group of a job or container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MACHINE = "the machine's memory"


def host_limit(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), machine_bytes: int | None = None
) -> tuple[int, str]:
    """Return the bytes that all processes of this job on this host may use together, and their source: `MACHINE`, or a file.

    The result is the smallest limit among those of the process's control group and its ancestors, of either version (kernel
    documentation, admin-guide/cgroup-v2.rst: ``memory.max``; cgroup-v1/memory.rst: ``memory.limit_in_bytes``).

    Args:
        groups: folder in which control groups are mounted.
        membership: file that lists the control groups of the process.
        machine_bytes: memory of the machine; None to query it.
    """
    if machine_bytes is None:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([(machine_bytes, MACHINE), *_limits(groups, membership)], key=lambda found: found[0])


def _limits(groups: Path, membership: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux, or no permission to read
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):  # in a container a path may be the host's, of which only the root is there
            if not folder.is_relative_to(root):
                break
            if (limit := _read(folder / name)) is not None:
                yield limit, str(folder / name)


def _read(path: Path) -> int | None:
    """Return the limit in a file; None if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
