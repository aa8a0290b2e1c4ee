"""Figures from the processes of a run for its test: in files, because lines of several processes can mix in one output."""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = "FIGURES_TO"


def record_figures(figures: dict[str, Any]) -> None:
    with Path(os.environ[FOLDER], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")


def recorded(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines())
