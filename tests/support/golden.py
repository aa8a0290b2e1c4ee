"""Texts that are compared with files in `tests/golden`, which ``MEGATRON_EPP_WRITE_GOLDEN=1`` writes anew."""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def assert_as_written(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MEGATRON_EPP_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), "MEGATRON_EPP_WRITE_GOLDEN=1 writes the file anew"
