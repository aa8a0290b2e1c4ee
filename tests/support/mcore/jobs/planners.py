"""Trains a few iterations; the processes that it leaves behind go to its report folder."""

import os
import shlex
from pathlib import Path

import psutil

from megatron_epp.mcore import entry
from scripts.parity.runs import train

ITERATIONS = 6
FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 192 --max-position-embeddings 192 --hidden-dropout 0 "
    "--attention-dropout 0 --transformer-impl local --micro-batch-size 1 --global-batch-size 6 --lr 1e-3 "
    f"--lr-decay-style constant --train-iters {ITERATIONS} --tokenizer-type NullTokenizer --vocab-size 255 --split 75,25,0 "
    "--eval-iters 1 --eval-interval 2 --log-interval 1 --calculate-per-token-loss --epp --epp-trace 3 "
    "--pipeline-model-parallel-size 2"
)


def run(data: str, folder: Path) -> None:
    entry.prepare()
    train([*FLAGS, "--data-path", data, "--epp-report-dir", str(folder)])
    left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    (folder / f"left{os.environ['RANK']}").write_text("\n".join(map(str, left)))
