"""What jobs have in common that train in forked worlds: flags and documents, the trainings, and what their ranks write.

Whoever imports this module has imported and patched no Megatron: `flags_of` does.
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.parity.runs import Run

LIMIT_S = 300


def flags_of(folder: Path, iterations: int, context: int, batch: int) -> list[str]:
    """Prepare Megatron; return the flags that all runs share, among them documents written into a folder."""
    from scripts.parity.cells import LENGTHS, VOCABULARY, common_flags
    from scripts.parity.worlds import load_megatron
    from scripts.random_documents import write_documents

    load_megatron()
    documents = write_documents(folder / "documents", LENGTHS, VOCABULARY)
    return [*common_flags(iterations, context, batch, validates=False), "--data-path", documents]


def trained(num_processes: int, flags: Sequence[str], folder: Path, checkpoint: Path | None = None) -> list[Run]:
    """Train once; return what every rank saw. Raises AssertionError with the end of the log if it fails."""
    from scripts.parity.worlds import Training, train_all

    (runs,) = train_all([Training(num_processes, tuple(flags), checkpoint)], folder, LIMIT_S).values()
    assert not isinstance(runs, str), f"{flags}: {runs}"
    return runs


def write(args: Namespace, facts: object) -> None:
    """Write what a rank has seen into the folder of its report, where `written` finds it."""
    folder = Path(args.epp_report_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(facts))


def written(trainings: Mapping[str, tuple[int, Sequence[str]]], folder: Path) -> dict[str, Any]:
    """Train all, by name, with processes and flags; return what each rank wrote into a file rank*.json of its report's folder.

    Of a training that failed, return the end of the log as `error`.
    """
    from scripts.parity.worlds import Training, train_all

    places = {name: folder / name for name in trainings}
    runs = {name: Training(n, (*flags, "--epp-report-dir", str(places[name]))) for name, (n, flags) in trainings.items()}
    done = train_all(runs.values(), Path(tempfile.mkdtemp(dir=folder)), LIMIT_S)
    wrote = {name: [json.loads(path.read_text()) for path in sorted(places[name].glob("rank*.json"))] for name in runs}
    return {name: {"error": done[run]} if isinstance(done[run], str) else wrote[name] for name, run in runs.items()}
