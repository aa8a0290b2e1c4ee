"""Trains a few iterations; the processes that it leaves behind go to its report folder."""

import os
import shlex
from pathlib import Path

import psutil

from megatron_epp.mcore import entry
from scripts.parity.runs import train
from tests.support.mcore.launch import CHOOSING

ITERATIONS = 6
FLAGS = CHOOSING + shlex.split(
    f"--seq-length 192 --max-position-embeddings 192 --global-batch-size 6 --train-iters {ITERATIONS} --vocab-size 255 "
    "--split 75,25,0 --eval-iters 1 --eval-interval 2 --epp-trace 3 --pipeline-model-parallel-size 2"
)


def run(data: str, folder: Path) -> None:
    entry.prepare()
    train([*FLAGS, "--data-path", data, "--epp-report-dir", str(folder)])
    left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    (folder / f"left{os.environ['RANK']}").write_text("\n".join(map(str, left)))
