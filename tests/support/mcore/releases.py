"""Releases of megatron-core next to the one the tests run with."""

import sys
from pathlib import Path

from tests.support import package_index

OTHER_RELEASES = ("0.18.2",)
FOLDER = Path(sys.prefix) / "megatron-releases"


def release(wanted: str) -> Path:
    """The folder that holds a release's `megatron/`. Skips the test without one."""
    return package_index.release("megatron-core", wanted, FOLDER)
