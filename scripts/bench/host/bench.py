"""Counts of the host's work for one action, without a GPU: `python -m scripts.bench.host`.

Trains a GPT of two layers on one rank, with plans and with Megatron's own schedule, and counts in every forward and backward
the operations that torch dispatches, those of them that would launch a kernel, and calls of Python functions. They do not
depend on sizes, so a small model on a CPU shows them; attention is one operation, as it is on a GPU. Then counts the same for
two layers of Llama 3 8B and of Mixtral 8x7B, with fake tensors and stand-ins for Transformer Engine's modules (`engine`). Where
the host takes longer for an action than the device, the device runs out of work. The last column is dispatched operations times
`OP_US`, those of Transformer Engine times `ENGINE_US`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_epp.launch.runs import tiny_gpt, train
from scripts.bench.frame import Bench, Figures
from scripts.bench.host.worker import COUNTS
from scripts.random_documents import write_documents
from scripts.tables import table

OP_US = 4.0, 7.0
"""Host time of a dispatched operation in microseconds: 4 on CUDA and 7 with autograd (pytorch/pytorch, issues 82793, 41383)."""
ENGINE_US = 13.0, 95.0
"""Host time of an operation of Transformer Engine: from 13, that of torch's linear layer on an H100's host, which new releases
come near, to the 90 to 100 measured for the forward of its own on Grace (NVIDIA/TransformerEngine, issues 2053 and 2126)."""
MEGATRON = "of Megatron"
CONTEXT = 256
LENGTHS = (256, 31, 30, 29, 28, 27, 26, 25)
"""The first is cut in two; the others are packed in twos and fives."""
_SCHEDULES = {"plans": {"epp_slices": 2, "epp_recompute": 0}, "Megatron's": {"epp_schedule": "whole"}}
_ITERATIONS = 3
_ROOT = Path(__file__).resolve().parents[3]
_WRITE_STAGES = """
import pathlib, sys
from megatron_epp.mcore import cpu
cpu.activate()  # before Megatron is imported
from scripts.bench.host.stage import write
write(pathlib.Path(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """Medians over all actions of a kind.

    Attributes:
        op: the operation; with `MEGATRON` where Megatron's own schedule runs it.
        segments: sequences, or parts of one, in the chunk; a chunk with one is a slice where plans run it.
        ops: dispatched operations.
        launches: those that launch a kernel.
        allocations: tensors with memory of their own that they make.
        calls: calls of Python functions, without those of Transformer Engine.
        of_engine: operations of Transformer Engine, which cost `ENGINE_US` each.
        stage: the model of two layers without embedding and loss; empty for the small GPT that trains.
    """

    op: str
    segments: int
    ops: int
    launches: int
    allocations: int
    calls: int
    of_engine: int = 0
    stage: str = ""

    @property
    def host_us(self) -> tuple[float, float]:
        """Least and most time of the host."""
        of_torch = self.ops - self.of_engine
        least, most = (of_torch * op_us + self.of_engine * own_us for op_us, own_us in zip(OP_US, ENGINE_US, strict=True))
        return least, most


def count(folder: Path) -> list[Counts]:
    """Train with plans and with Megatron's schedule, and count. Documents, logs and counts are in `folder`."""
    data = write_documents(folder / "documents", LENGTHS, 255)
    common = tiny_gpt(num_layers=2, seq_length=CONTEXT, max_position_embeddings=CONTEXT, num_workers=0)
    common |= {"micro_batch_size": 1, "global_batch_size": len(LENGTHS), "train_iters": _ITERATIONS, "lr": 1e-3}
    common |= {"data_path": data, "split": "100,0,0", "eval_iters": 0}
    rows = defaultdict(list)
    for name, flags in _SCHEDULES.items():
        path = folder / f"{name}.jsonl"
        train(folder / name, 1, common | flags, program="scripts.bench.host.worker", environment={COUNTS: str(path)})
        for action in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            figures = sum(action["names"].values()), action["launches"], action["allocations"], action["calls"]
            rows[action["op"], action["segments"]].append(figures)
    medians = {key: [round(statistics.median(values)) for values in zip(*each, strict=True)] for key, each in rows.items()}
    return [Counts(*key, *medians[key]) for key in sorted(medians) if key[0] != "REDUCE"]


def count_stages(folder: Path) -> list[Counts]:
    """Count the actions of stages of large models. The log and the counts are in `folder`."""
    path, log = folder / "stages.jsonl", folder / "stages.log"
    with log.open("w", encoding="utf-8") as output:
        subprocess.run([sys.executable, "-c", _WRITE_STAGES, path], check=True, stdout=output, stderr=output, cwd=_ROOT)
    actions = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Counts(ops=sum(action.pop("names").values()), **action) for action in actions]


def row(args: Namespace, counts: Callable[[Path], list[Counts]]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return {"counts": [asdict(of_action) for of_action in counts(Path(folder))]}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    return shown(Counts(**of_action) for row in rows for of_action in row["counts"])


def shown(counts: Iterable[Counts]) -> str:
    """Format counts as a table."""
    names = "segments", "ops", "launches", "allocations", "calls"
    cells = [
        [own.stage or "tiny GPT", own.op, *(getattr(own, name) for name in names), "{:.0f} to {:.0f}".format(*own.host_us)]
        for own in counts
    ]
    return table(["stage", "action", *names[:-1], "Python calls", "host us"], cells)


BENCH = Bench(about=__doc__, cases=lambda args: {"training": count, "stages": count_stages}, row=row, text=text)
