"""Counts of the host's work for one action, without a GPU: `python -m scripts.bench.host`.

Trains a GPT of two layers on one rank, with plans and with Megatron's own schedule, and counts in every forward and backward
the operations that torch dispatches, those of them that would launch a kernel, and calls of Python functions. They do not
depend on sizes, so a small model on a CPU shows them; attention is one operation, as it is on a GPU. Where the host takes
longer for an action than the device, the device runs out of work.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_epp.tools.launch.runs import tiny_gpt, train
from scripts.bench.frame import Bench, Figures
from scripts.bench.host_rank import COUNTS
from scripts.random_documents import write_documents
from scripts.tables import table

CONTEXT = 256
LENGTHS = (256, 100, 24, 23, 22, 21, 20, 19)
"""The first is cut in two; the others are packed in two and in five."""
SCHEDULES = {"plans": {"epp_slices": 2, "epp_recompute": 0}, "Megatron's": {"epp_schedule": "whole"}}
_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """Medians over all actions of a kind.

    Attributes:
        op: the operation; with `MEGATRON` where Megatron's own schedule runs it.
        segments: sequences, or parts of one, in the chunk; a chunk with one is a slice where plans run it.
        ops: dispatched operations.
        launches: those that launch a kernel.
        allocations: tensors with memory of their own that they make.
        calls: calls of Python functions.
    """

    op: str
    segments: int
    ops: int
    launches: int
    allocations: int
    calls: int


def count(folder: Path) -> list[Counts]:
    """Train with plans and with Megatron's schedule, and count. Documents, logs and counts are in `folder`."""
    rows = defaultdict(list)
    for name in SCHEDULES:
        for action in actions_of(folder, name):
            figures = sum(action["names"].values()), action["launches"], action["allocations"], action["calls"]
            rows[action["op"], action["segments"]].append(figures)
    medians = {key: [round(statistics.median(values)) for values in zip(*each, strict=True)] for key, each in rows.items()}
    return [Counts(*key, *medians[key]) for key in sorted(medians) if key[0] != "REDUCE"]


def actions_of(folder: Path, schedule: str) -> Iterable[Figures]:
    """Train with a schedule; return what every action made the host do."""
    data, path = write_documents(folder / "documents", LENGTHS, 255), folder / f"{schedule}.jsonl"
    settings = tiny_gpt(num_layers=2, seq_length=CONTEXT, max_position_embeddings=CONTEXT, num_workers=0)
    settings |= {"micro_batch_size": 1, "global_batch_size": len(LENGTHS), "train_iters": _ITERATIONS, "lr": 1e-3}
    settings |= {"data_path": data, "split": "100,0,0", "eval_iters": 0} | SCHEDULES[schedule]
    train(folder / schedule, 1, settings, program="scripts.bench.host_rank", environment={COUNTS: str(path)})
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def row(args: Namespace, case: None) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return {"counts": [asdict(of_action) for of_action in count(Path(folder))]}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    return shown(Counts(**of_action) for row in rows for of_action in row["counts"])


def shown(counts: Iterable[Counts]) -> str:
    """Format counts as a table."""
    names = "op", "segments", "ops", "launches", "allocations", "calls"
    return table(["action", *names[1:-1], "Python calls"], [[getattr(own, name) for name in names] for own in counts])


BENCH = Bench(about=__doc__, cases=lambda args: {"training": None}, row=row, text=text)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
