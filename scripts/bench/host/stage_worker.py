"""Counts of the stages of two large models: `python -m scripts.bench.host.stage_worker`.

Counts are written to the file that the environment variable `COUNTS` names, a line of JSON for each action.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_epp.mcore import cpu
from scripts.bench.host.worker import COUNTS

MODELS = "llama3-8b", "mixtral-8x7b"


def main() -> None:
    """Write the counts."""
    cpu.activate()  # before Megatron is imported
    from scripts.bench.host.engine import OPERATIONS
    from scripts.bench.host.stage import count

    with Path(os.environ[COUNTS]).open("w", encoding="utf-8") as file:
        for model in MODELS:
            for op, segments, counted in count(model):
                of_engine = sum(number for name, number in counted.names.items() if name in OPERATIONS)
                line = {"op": op, "segments": segments, "stage": model, "of_engine": of_engine, **counted.figures()}
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
