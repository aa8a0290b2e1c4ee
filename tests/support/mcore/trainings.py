"""Functions that worlds of ranks call (`worker.call`): trainings, recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.parity.planner import share_planner
from scripts.parity.runs import Run, record


def recorded(flags: Sequence[str], checkpoint: str | None = None) -> Run:
    """Train with these flags of Megatron. Saves a checkpoint ahead of the first step, if a place for it is named."""
    share_planner()
    return record(flags, None if checkpoint is None else Path(checkpoint))
